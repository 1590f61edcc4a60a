"""Ways to train a small model, and settings to train it with, for the simulated device."""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from layerzero import BackwardPrefetch, MixedPrecision, OffloadPolicy, ReductionPolicy, ZeRO3
from layerzero.optim import WholeTensorOptimizer
from layerzero.parallel.pipeline import unshard_all
from layerzero.state_dict.full_tensors import stream_full
from tests.harness.internals import move_shards, root_state
from tests.harness.models import WIDTH, Block, Mlp

MOMENTUM = functools.partial(torch.optim.SGD, momentum=0.9)


def wrapped(group: dist.ProcessGroup | None = None, **arguments: Any) -> ZeRO3:
    torch.manual_seed(0)
    return ZeRO3(Mlp(3), group, auto_wrap_policy={Block}, **arguments)


def train(
    model: ZeRO3, steps: int = 3, optimizer_class: Callable[..., Optimizer] = MOMENTUM
) -> list[torch.Tensor]:
    """The default's accesses are of the same kinds as AdamW's, in a quarter of the operators."""
    optimizer = optimizer_class(model.parameters(), lr=0.01)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(3, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def plain_steps(model: ZeRO3) -> None:
    train(model)


def accumulation(model: ZeRO3) -> None:
    for sync in (False, False, True, True):
        with nullcontext() if sync else model.no_sync():
            model(torch.randn(3, WIDTH)).sum().backward()
    train(model, 1)


def evaluation_between(model: ZeRO3) -> None:
    train(model, 2)
    with torch.no_grad():
        model(torch.randn(3, WIDTH))
    train(model, 2, torch.optim.AdamW)


def clipping(model: ZeRO3) -> None:
    train(model, 1)
    model(torch.randn(3, WIDTH)).sum().backward()
    model.clip_grad_norm_(0.1)
    train(model, 1)


@torch.no_grad()
def _halve(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.mul_(0.5)


def summoning(model: ZeRO3) -> None:
    train(model, 1)
    with model.summon_full_params():
        _halve(model)
    train(model, 2)


def explicit_unshard(model: ZeRO3) -> None:
    train(model, 1)
    handle = model.unshard(async_op=True)
    handle.wait()
    model.reshard()
    train(model, 1)


def moving_shards(model: ZeRO3) -> None:
    train(model, 1)
    move_shards(model, torch.clone)
    train(model, 1)


def recomputation(model: ZeRO3) -> None:
    for block in model.module.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    train(model)


def several_forwards(model: ZeRO3) -> None:
    train(model, 1)
    outputs = [model(torch.randn(3, WIDTH)) for _ in range(3)]
    for output in reversed(outputs):
        output.sum().backward()
    train(model, 1)


def pipelining(model: ZeRO3) -> None:
    outputs = [model(torch.randn(3, WIDTH)) for _ in range(2)]
    for index in range(4):
        with nullcontext() if index == 3 else model.no_sync():
            outputs[index].sum().backward()
        if index < 2:
            outputs.append(model(torch.randn(3, WIDTH)))
    train(model, 1)


def keeping_units(model: ZeRO3) -> None:
    """What a stage of a pipeline does, gathered by itself or by the schedule."""
    root = root_state(model)
    for by_schedule in (False, True):
        root.scheduler.hold_micro_batches(True)
        if by_schedule:
            unshard_all(root)
        outputs = [model(torch.randn(3, WIDTH)) for _ in range(3)]
        for index, output in enumerate(outputs):
            if index == 2:
                root.scheduler.hold_micro_batches(False)
            with nullcontext() if index == 2 else model.no_sync():
                output.sum().backward()
        root.scheduler.free_all()
        train(model, 1)


def optimizing_after_a_forward(model: ZeRO3) -> None:
    """Weights may be written on the host as soon as a forward has returned."""
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            model(torch.randn(3, WIDTH))
        _halve(model)
    train(model, 1)


def streaming(model: ZeRO3) -> None:
    """Full weights one after the other, while the next are gathered; and stopped early."""
    train(model, 1)
    for nbytes in (1 << 20, 200):
        for _, full in stream_full(model, nbytes):
            full.sum()
        for _ in stream_full(model, nbytes):
            break
    train(model, 1)


def whole_tensors(model: ZeRO3) -> None:
    """In several buckets, and again after weights were written between steps."""
    optimizer = WholeTensorOptimizer(
        model.parameters(), torch.optim.SGD, lr=0.01, momentum=0.9, bucket_bytes=200
    )
    for _ in range(2):
        model(torch.randn(3, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            next(model.parameters()).mul_(0.5)


def a_missing_gradient(model: ZeRO3) -> None:
    """The rank has to look at what the others had."""
    block = model.module.blocks[1]
    block.forward = lambda x: x + F.linear(block.up(x), block.down.weight)
    train(model, 2)


def unused_gathers(model: ZeRO3) -> None:
    """What was gathered is freed, and nobody has waited for it. Weights are written after that, or
    before, inside a forward: then the unit is gathered again."""
    train(model, 1)
    model.unshard(async_op=True)
    model.reshard()
    _halve(model)
    model.module.register_forward_pre_hook(lambda *_: _halve(model.module.blocks[0]))
    train(model, 2)


def a_momentum_encoder(model: ZeRO3) -> None:
    """The forward writes its weights, which changes no version, and runs it without gradients."""
    *blocks, encoder = model.module.blocks

    def forward(x: torch.Tensor) -> torch.Tensor:
        own = functools.reduce(lambda y, block: block(y), blocks, x)
        with torch.no_grad():
            for parameter in encoder.parameters():
                parameter.data.mul_(0.5)
            key = encoder(x)
        return own * key

    encoder.requires_grad_(False)
    model.forward = forward  # type: ignore[method-assign]
    train(model)


USES = [
    plain_steps,
    accumulation,
    evaluation_between,
    clipping,
    summoning,
    explicit_unshard,
    moving_shards,
    recomputation,
    several_forwards,
    pipelining,
    keeping_units,
    streaming,
    a_missing_gradient,
    unused_gathers,
    a_momentum_encoder,
    whole_tensors,
]
BF16 = {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)}
REDUCED_IN_FLOAT32 = {
    "mixed_precision": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
}
TWO_LANES = {"reduction": ReductionPolicy(separate_groups=True, in_flight="1GB")}
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "bfloat16": BF16,
    "deterministic": {"deterministic": True},
    "three ahead, no limit": {"forward_prefetch": 3, "limit_all_gathers": False},
    "backward post": {"backward_prefetch": BackwardPrefetch.BACKWARD_POST},
    "no prefetch": {"forward_prefetch": False, "backward_prefetch": None},
    "stays full": {"reshard_after_forward": False},
    "sum": {"gradient_reduction": "sum"},
    "sums in shards": {"accumulation": "sharded"},
    "two lanes": TWO_LANES,
}
LAYERED: dict[str, dict[str, Any]] = {
    "zero1": {"zero3_size": 2},
    "zero1, bfloat16": {"zero3_size": 2, **BF16},
    "replicate": {"zero3_size": 2, "outer": "replicate"},
    "replicate, bfloat16": {"zero3_size": 2, "outer": "replicate", **REDUCED_IN_FLOAT32},
    "deterministic": {"zero3_size": 2, "deterministic": True},
    "sums in shards": {"zero3_size": 2, "accumulation": "sharded"},
    "sums in shards, replicate": {"zero3_size": 2, "outer": "replicate", "accumulation": "sharded"},
    "kept shards": {"zero3_size": 2, "outer": "shard", "reshard_after_forward": "compute_shard"},
    "two lanes": {"zero3_size": 2, **TWO_LANES, **BF16},
    "two lanes, replicate": {"zero3_size": 2, "outer": "replicate", **TWO_LANES},
    "whole parameters": {"zero3_size": 1},
    "whole parameters, replicated": {"zero3_size": 1, "outer": "replicate"},
    "whole parameters, replicated, bfloat16": {"zero3_size": 1, "outer": "replicate", **BF16},
}
if hasattr(torch.UntypedStorage, "_swap_data_ptr_"):  # Since torch 2.13.
    SETTINGS["arena"] = {"arena": True}
    LAYERED["arena, bfloat16"] = {"zero3_size": 2, "arena": True, **REDUCED_IN_FLOAT32}
OFFLOADED: dict[str, dict[str, Any]] = {
    "sums": {"offload": OffloadPolicy(grads=True), "accumulation": "unsharded"},
    "sums in shards": {"offload": OffloadPolicy(grads=True), "accumulation": "sharded"},
    "sums in layers": {
        "offload": OffloadPolicy(grads=True),
        "accumulation": "sharded",
        "zero3_size": 1,
    },
    "bfloat16 sums": {"offload": OffloadPolicy(grads=True), "accumulation": "unsharded", **BF16},
    "parameters": {"offload": OffloadPolicy(params=True)},
    "bfloat16 parameters": {"offload": OffloadPolicy(params=True), **BF16},
    "everything": {"offload": OffloadPolicy(params=True, grads=True), "accumulation": "sharded"},
    "two lanes": {"offload": OffloadPolicy(params=True, grads=True), **TWO_LANES},
    "whole parameters": {"offload": OffloadPolicy(params=True), "zero3_size": 1},
}
HOST_USES = [
    plain_steps,
    accumulation,
    evaluation_between,
    recomputation,
    pipelining,
    optimizing_after_a_forward,
    whole_tensors,
]
