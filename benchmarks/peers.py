"""Engines that are installed as an extra, `pip install --no-build-isolation '.[peers]'`.

DeepSpeed builds its native parts when they are first used.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor, nn

PEERS = ("deepspeed",)


def installed_peers() -> tuple[str, ...]:
    return tuple(name for name in PEERS if importlib.util.find_spec(name))


def deepspeed(model: nn.Module, lr: float, batch: int) -> Callable[[Tensor], Tensor]:
    """DeepSpeed's ZeRO-3 with its defaults, over the default group, and torch's AdamW.

    Returns:
        A training step: takes a batch of `batch` sequences, returns the loss.
    """
    os.environ["DS_ACCELERATOR"] = "cpu"
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
