"""Why a unit stays full is written on it, and it is freed when no reason is left."""

import pytest
import torch
from torch import nn

from layerzero import Hold, fully_shard, units
from layerzero.step.unit import ShardState
from tests.harness.compare import zero3
from tests.harness.internals import root_state
from tests.harness.models import WIDTH, Block, Mlp
from tests.harness.ranks import on_ranks
from tests.harness.reference import own_batch, seeded


def _held(model: nn.Module) -> dict[str, Hold]:
    """Units that are full, and why; freed ones hold nothing but what the user set."""
    for unit in units(model):
        assert unit.state is ShardState.UNSHARDED or not unit.holds & ~Hold.AFTER_BACKWARD, unit
    return {unit.fqn: unit.holds for unit in units(model) if unit.state is not ShardState.SHARDED}


def _names(model: nn.Module) -> list[str]:
    return [unit.fqn for unit in units(model) if unit.num_parameters]


@on_ranks(2)
def test_units_stay_until_their_backward_for_a_reason() -> None:
    for options, held in (
        ({}, {"": Hold.LAST_OF_FORWARD}),  # The root's forward ends last.
        ({"reshard_after_forward": False}, dict.fromkeys(_names(zero3(Mlp, Block)), Hold.POLICY)),
    ):
        model = zero3(Mlp, Block, **options)
        output = model(own_batch())
        assert _held(model) == held
        (unit,) = (unit for unit in units(model) if unit.fqn == "")
        assert f"held: {held[''].name}" in repr(unit)
        output.sum().backward()
        assert _held(model) == {}
        assert "held" not in repr(unit)
    unit = units(model)[1]
    unit.unshard()
    assert _held(model) == {unit.fqn: Hold.EXPLICIT}
    unit.reshard()
    assert _held(model) == {}
    unit.unshard()
    model(own_batch()).sum().backward()
    assert _held(model) == {}


@on_ranks(2)
def test_all_units_stay_while_micro_batches_run() -> None:
    model = zero3(Mlp, Block)
    root = root_state(model)
    root.scheduler.hold_micro_batches(True)
    outputs = [model(own_batch()) for _ in range(2)]
    assert all(holds & Hold.MICRO_BATCHES for holds in _held(model).values())
    assert set(_held(model)) == set(_names(model))
    with model.no_sync():
        outputs.pop().sum().backward()
    assert set(_held(model)) == set(_names(model))
    root.scheduler.hold_micro_batches(False)
    outputs.pop().sum().backward()
    assert _held(model) == {}
    model(own_batch())
    assert len(_held(model)) == 1
    root.scheduler.free_all()
    assert _held(model) == {}


@on_ranks(2)
def test_what_the_user_keeps_stays_kept_after_an_error() -> None:
    model = seeded(Mlp)
    for module in (*model.blocks, model):
        fully_shard(module)
    model.set_reshard_after_backward(False)
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.ones(2, WIDTH + 1))
    assert _held(model) == {}
    model(own_batch()).sum().backward()
    root_state(model).scheduler.free_all()  # As after the micro-batches of a pipeline.
    assert _held(model) == dict.fromkeys(_names(model), Hold.AFTER_BACKWARD)
    model.set_reshard_after_backward(True)
    model(own_batch()).sum().backward()
    assert _held(model) == {}


@on_ranks(2)
def test_all_units_stay_for_a_second_backward() -> None:
    model = zero3(Mlp, Block)
    x = own_batch().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).tanh().sum(), x, create_graph=True)
    held = _held(model)
    assert set(held) == set(_names(model))
    assert all(holds & Hold.DOUBLE_BACKWARD for holds in held.values())
    gradient.pow(2).sum().backward()
    assert _held(model) == {}
