"""Engines that are installed as an extra, `pip install --no-build-isolation '.[peers]'`.

DeepSpeed builds its native parts when they are first used. Megatron-FSDP is megatron-fsdp on PyPI.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

Step = Callable[[Tensor], Tensor]
"""Takes a batch of sequences, returns the loss."""


PEERS = ("deepspeed",)
"""Those that run on a CPU; `STEPS` has all."""


def installed_peers(names: Iterable[str] = PEERS) -> tuple[str, ...]:
    return tuple(name for name in names if importlib.util.find_spec(name))


def deepspeed(model: nn.Module, lr: float, batch: int) -> Step:
    """DeepSpeed's ZeRO-3 with its defaults, over the default group, and torch's AdamW.

    On a GPU compute is in bfloat16. Batches have `batch` sequences.
    """
    device = next(model.parameters()).device
    os.environ["DS_ACCELERATOR"] = device.type
    os.environ["LOCAL_RANK"] = str(dist.get_rank())  # asserted, not read, on the CPU
    import deepspeed as package

    package.logger.setLevel("ERROR")
    engine, *_ = package.initialize(
        model=model,
        model_parameters=model.parameters(),
        dist_init_required=False,
        config={
            "train_micro_batch_size_per_gpu": batch,
            "zero_optimization": {"stage": 3},
            "bf16": {"enabled": device.type == "cuda"},
            # Its own CPU optimizer is for offloaded states; every other engine here has torch's.
            "zero_force_ds_cpu_optimizer": False,
            "optimizer": {"type": "AdamW", "params": {"lr": lr, "torch_adam": True}},
        },
    )

    def step(tokens: Tensor) -> Tensor:
        loss: Tensor = engine(tokens)
        engine.backward(loss)
        engine.step()  # clears gradients as well
        return loss.detach()

    return step


def megatron_fsdp(model: nn.Module, lr: float, batch: int) -> Step:
    """Megatron-FSDP's ZeRO-3 with its defaults (bfloat16, float32 main weights), torch's AdamW."""
    from megatron_fsdp import fully_shard_model, fully_shard_optimizer

    blocks = [type(model.blocks[0])]  # type: ignore[index]
    sharded = fully_shard_model(model.to(torch.bfloat16), fsdp_unit_modules=blocks)
    adam = torch.optim.AdamW(sharded.parameters(), lr=lr, fused=True)
    optimizer = fully_shard_optimizer(adam)

    def step(tokens: Tensor) -> Tensor:
        loss: Tensor = sharded(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


STEPS: dict[str, Callable[[nn.Module, float, int], Step]] = {
    "deepspeed": deepspeed,
    "megatron_fsdp": megatron_fsdp,
}
