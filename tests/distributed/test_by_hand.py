"""Units gathered by hand: what is there is used, and not gathered again."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from layerzero import ZeRO3, pregather, units
from layerzero.step.unit import ShardState
from tests.harness.checks import assert_bitwise
from tests.harness.compare import assert_trains_alike, zero3
from tests.harness.models import CASES, WIDTH, Block, Mlp
from tests.harness.ranks import run_ranks
from tests.harness.recording import full_nbytes, gathered, recorded_operations
from tests.harness.reference import batches_of, forward_backward, full_parameters, seeded

ALL = ["blocks.0", "blocks.1", "blocks.2", ""]


def names(operations) -> list[str]:
    return sorted("" if name == "the root unit" else name for name in gathered(operations))


def _pregather() -> None:
    model, plain = zero3(lambda: Mlp(3), Block), seeded(lambda: Mlp(3))
    batches = batches_of(CASES["mlp"], dist.get_world_size(), steps=3)

    def run(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if not isinstance(model, ZeRO3):
            return forward_backward(model, batch)
        for wait in (True, False):
            with recorded_operations(model) as operations:
                pregather(model, wait=wait)
            # What is there stays; `parameters()` are shards all the while.
            assert names(operations) == (sorted(ALL) if wait else [])
        assert all(parameter.dim() == 1 for parameter in model.parameters())
        assert all(full_nbytes(model).values())
        with recorded_operations(model) as operations:
            loss = forward_backward(model, batch)
        # Nothing in forward; each but the one that stays in backward. A small unit's next one is
        # the root, which is freed last.
        assert len(names(operations)) == len(ALL) - 1
        assert not any(full_nbytes(model).values())
        return loss

    assert_trains_alike(model, plain, batches, run=run)
    # Weights that change in between are gathered again; a forward without gradients frees all.
    pregather(model)
    with torch.no_grad():
        for each in (model, plain):
            for parameter in each.parameters():
                parameter.mul_(0.5)
        assert_bitwise(model(batches[0][0]), plain(batches[0][0]), "output")
    assert not any(full_nbytes(model).values())
    # Of one unit with those inside; and none that was not asked for.
    with recorded_operations(model) as operations:
        pregather(model.module.blocks[1])
    assert names(operations) == ["blocks.1"]
    model(batches[0][0]).sum().backward()
    with pytest.raises(ValueError, match="pregather: expected a ZeRO3 module, got Linear"):
        pregather(torch.nn.Linear(2, 2))
    handle = model.module.blocks[1].register_forward_hook(lambda *_: pregather(model))
    with pytest.raises(RuntimeError, match="pregather: called inside forward or backward"):
        model(batches[0][0])
    handle.remove()
    # Micro-batches: weights do not change between them, and are not asked for again.
    with model.no_sync():
        pregather(model)
        model(batches[0][0]).sum().backward()
        pregather(model)
    model(batches[0][0]).sum().backward()


def test_pregathered_units_are_used_by_the_next_forward() -> None:
    run_ranks(2, _pregather)


def _each_unit() -> None:
    model, plain = zero3(lambda: Mlp(3), Block), seeded(lambda: Mlp(3))
    values = full_parameters(model)
    batches = batches_of(CASES["mlp"], dist.get_world_size(), steps=2)

    def run(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if not isinstance(model, ZeRO3):
            return forward_backward(model, batch)
        with recorded_operations(model) as operations:
            handles = [unit.unshard(async_op=True) for unit in units(model)]
            for handle in handles:
                handle.wait()
        assert names(operations) == sorted(ALL)
        assert model.module.blocks[2].up.weight.dim() == 2
        with recorded_operations(model) as operations:
            loss = forward_backward(model, batch)
        assert len(names(operations)) == len(ALL) - 1
        assert all(unit.state is ShardState.SHARDED for unit in units(model))
        return loss

    assert_trains_alike(model, plain, batches, run=run)
    unit = next(unit for unit in units(model) if unit.fqn == "blocks.1")
    unit.unshard()
    assert unit.module.up.weight.shape == values["blocks.1.up.weight"].shape
    # Used outside its forward: its gradient is reduced as any other.
    unit.module.up.weight.square().sum().backward()
    unit.reshard()
    assert unit.module.up.weight.dim() == 1
    assert unit.module.up.weight.grad is not None
    assert model.module.blocks[0].up.weight.shape[-1] != WIDTH


def test_each_unit_of_a_policy_may_be_unsharded() -> None:
    run_ranks(2, _each_unit)
