"""On two ranks, in float32, losses are bitwise those of torch's own engines in the same run."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from layerzero import BackwardPrefetch
from tests.harness.checks import assert_bitwise, assert_same_parameters
from tests.harness.compare import sharded
from tests.harness.models import CASES, Transformer, TransformerBlock
from tests.harness.ranks import KeptRanks, on_ranks, run_ranks
from tests.harness.reference import (
    OPTIMIZERS,
    batches_of,
    full_parameters,
    seeded,
    train_rank,
)

STEPS = 30
CASE = CASES["transformer"]


def _batches(steps: int) -> list[list[Any]]:
    """The same few again and again, so that there is something to learn."""
    return (batches_of(CASE, dist.get_world_size(), steps=3) * steps)[:steps]


def _train(model: nn.Module, optimizer: str, steps: int = STEPS) -> list[torch.Tensor]:
    batches = _batches(steps)
    return train_rank(model, OPTIMIZERS[optimizer](model.parameters()), batches, dist.get_rank())


def _fully_sharded() -> nn.Module:
    model = seeded(Transformer)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in model.modules():
        if isinstance(module, TransformerBlock):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


@pytest.mark.parametrize(
    "optimizer",
    [
        name if name == "adamw" else pytest.param(name, marks=pytest.mark.soak)
        for name in OPTIMIZERS
    ],
)
@on_ranks(2)
def test_thirty_steps_are_bitwise_those_of_ddp_and_fully_shard(optimizer: str) -> None:
    ddp = DistributedDataParallel(seeded(Transformer))
    model = sharded(CASE)
    expected = _train(ddp, optimizer)
    fsdp = _fully_sharded()
    losses = {"DistributedDataParallel": expected, "fully_shard": _train(fsdp, optimizer)}
    own = _train(model, optimizer)
    assert expected[-1] < expected[0] - 1.0, "it does not train"
    for engine, theirs in losses.items():
        for step, (loss, other) in enumerate(zip(own, theirs, strict=True)):
            assert_bitwise(loss, other, f"loss of step {step} against {engine}")
    assert_same_parameters(full_parameters(model), full_parameters(ddp.module))


_RUNTIME_OPTIONS: list[dict[str, Any]] = [
    {"forward_prefetch": False, "backward_prefetch": None},
    {"forward_prefetch": 3},
    {"backward_prefetch": BackwardPrefetch.BACKWARD_POST},
    {"limit_all_gathers": False, "forward_prefetch": 8},
    {"limit_all_gathers": 1},
    {"limit_all_gathers": "1MB"},
    {"limit_all_gathers": "1B"},
    {"reshard_after_forward": False},
    {"reshard_after_forward": lambda module, fqn: fqn.endswith("1")},
    {"auto_wrap_policy": lambda module, fqn: fqn.count(".") == 1},
    {"deterministic": True},
]


@on_ranks(2)
def test_when_and_how_far_ahead_units_are_gathered_changes_no_bit() -> None:
    expected = _train(DistributedDataParallel(seeded(Transformer)), "adamw", steps=3)
    for options in _RUNTIME_OPTIONS:
        losses = _train(sharded(CASE, **options), "adamw", steps=3)
        for step, (loss, other) in enumerate(zip(losses, expected, strict=True)):
            assert_bitwise(loss, other, f"{options}: loss of step {step}")


def _repeat() -> list[float]:
    return [loss.item() for loss in _train(sharded(CASE), "adamw", steps=3)]


def test_a_run_repeats_bitwise(ranks: KeptRanks) -> None:
    """On the same ranks, and on new ones."""
    first = ranks(2, _repeat)
    assert ranks(2, _repeat) == first
    assert run_ranks(2, _repeat) == first
