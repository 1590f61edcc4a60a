"""When units are gathered: recorded order, depth, lists, budget; and never a wrong one. Why a unit
stays full is written on it, and it is freed when no reason is left."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn

from layerzero import (
    BackwardPrefetch,
    Hold,
    ShardingPlan,
    ZeRO3,
    fully_shard,
    shard_with_plan,
    units,
)
from layerzero.step.unit import ShardState, Unit
from tests.harness.checks import assert_bitwise, named
from tests.harness.compare import zero3
from tests.harness.internals import root_state
from tests.harness.models import WIDTH, Block, Mlp, Routed
from tests.harness.ranks import on_ranks
from tests.harness.recording import gathered, observed, recorded_operations
from tests.harness.reference import own_batch, seeded

DEPTH = 5


def wrapped(**options) -> ZeRO3:
    torch.manual_seed(0)
    return ZeRO3(Routed(DEPTH), auto_wrap_policy={Block}, **options)


ALL = "0 1 2 3 4"


@contextmanager
def timeline() -> Iterator[list[str]]:
    """Gathers (g) and uses (u) of blocks in order, through the unit's own methods."""
    events: list[str] = []

    def note(letter: str, unit: Unit) -> None:
        if letter == "u" or unit.state.name == "SHARDED":
            events.append(letter + unit.fqn.removeprefix("blocks."))

    with (
        observed(Unit, "unshard", lambda unit, **_: note("g", unit)),
        observed(Unit, "show_unsharded", after=lambda _, unit: note("u", unit)),
    ):
        yield events


@on_ranks(2)
def test_forward_gathers_ahead_once_the_order_is_known() -> None:
    for depth, expected in (
        (False, "g0 u0 g1 u1 g2 u2 g3 u3 g4 u4"),
        (True, "g0 g1 u0 g2 u1 g3 u2 g4 u3 u4"),
        (2, "g0 g1 g2 u0 g3 u1 g4 u2 u3 u4"),
    ):
        model = wrapped(forward_prefetch=depth)
        with torch.no_grad():
            with recorded_operations(model) as operations:
                model(own_batch(), ALL)
            with timeline() as seen:
                model(own_batch(), ALL)
        assert gathered(operations) == [f"blocks.{i}" for i in ALL.split()], "nothing is guessed"
        assert " ".join(seen) == expected


@on_ranks(2)
def test_backward_gathers_ahead_and_before_the_reduction_that_it_need_not_wait_for() -> None:
    for mode, uses, expected in (
        (None, "u4 g3 u3 g2 u2 g1 u1 g0 u0", "r4 g3 r3 g2 r2 g1 r1 g0 r0"),
        (
            BackwardPrefetch.BACKWARD_PRE,
            "g3 u4 g2 u3 g1 u2 g0 u1 u0",
            "g3 r4 g2 r3 g1 r2 g0 r1 r0",
        ),
        (
            BackwardPrefetch.BACKWARD_POST,
            "u4 g3 u3 g2 u2 g1 u1 g0 u0",
            "g3 r4 g2 r3 g1 r2 g0 r1 r0",
        ),
    ):
        model = wrapped(backward_prefetch=mode)
        for _ in range(2):
            model(own_batch(), ALL).sum().backward()
        loss = model(own_batch(), ALL).sum()
        with timeline() as used, recorded_operations(model) as operations:
            loss.backward()
        assert " ".join(used) == uses, mode
        letters = {"all-gather": "g", "reduce-scatter": "r"}
        seen = [
            letters[operation.verb] + operation.unit.removeprefix("blocks.")
            for operation in operations
            if operation.verb in letters and operation.unit.startswith("blocks.")
        ]
        assert " ".join(seen) == expected, mode


@on_ranks(2)
def test_branches_never_gather_what_they_do_not_use() -> None:
    """Alternating branches, eval between: every gather is of a block that is used."""
    model = wrapped(forward_prefetch=3)
    routes = ["0 1 2", "0 3 4", "0 1 2", "0 3 4", ALL, "0 3 4", "0 1 2"]
    torch.manual_seed(0)
    reference = Routed(DEPTH)
    for step, route in enumerate(routes * 2):
        with recorded_operations(model) as operations:
            loss = model(own_batch(), route).sum()
            loss.backward()
        if step >= len(routes):  # both branches and the long route are known
            expected = [*route.split(), *reversed(route.split()[:-1])]
            assert gathered(operations) == [f"blocks.{i}" for i in expected]
        assert torch.equal(loss, reference(own_batch(), route).sum())
        with torch.no_grad():
            model.eval()
            with recorded_operations(model) as operations:
                model(own_batch(), "4 0")
            assert gathered(operations) == ["blocks.4", "blocks.0"]
            model.train()
        model.zero_grad()


@on_ranks(2)
def test_all_units_may_be_gathered_before_a_forward() -> None:
    """Every unit is there before the first one runs, unused ones too; steps are the same."""
    plain, plan = wrapped(), ShardingPlan(apply_modules=["blocks.{*}"], pregather=True)
    torch.manual_seed(0)
    model = shard_with_plan(Routed(DEPTH), plan)
    for _ in range(2):
        with timeline() as seen:
            losses = [each(own_batch(), "0 3 1").square().sum() for each in (model, plain)]
        assert seen[:6] == ["g0", "g1", "g2", "g3", "g4", "u0"]
        assert torch.equal(*losses)
        for each, loss in zip((model, plain), losses, strict=True):
            loss.backward()
            for parameter in each.parameters():
                parameter.data -= parameter.grad if parameter.grad is not None else 0.0
            each.zero_grad()
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(own, other)
    assert {unit.state.name for unit in units(model)} == {"SHARDED"}
    with torch.no_grad():
        model(own_batch(), "4")
    assert {unit.state.name for unit in units(model)} == {"SHARDED"}


@on_ranks(2)
def test_the_budget_bounds_what_is_resident() -> None:
    for limit, most in ((False, 5), (True, 5), (1, 1), (2, 2), ("1B", 1), ("1.2KB", 2)):
        with named(limit):
            _resident(limit, most)


def _resident(limit: bool | int | str, most: int) -> None:
    model = wrapped(forward_prefetch=4, limit_all_gathers=limit)
    nbytes = max(unit.nbytes for unit in units(model))
    root = root_state(model)
    counts: list[int] = []

    def count(*_: object, **__: object) -> None:
        counts.append(root.context.limiter.nbytes // nbytes)

    with torch.no_grad():
        model(own_batch(), ALL)
        with observed(Unit, "unshard", after=count):
            model(own_batch(), ALL)
    assert max(counts) == most
    assert root.context.limiter.nbytes == root.context.limiter.num_units == 0


@on_ranks(2)
def test_lists_of_modules_to_prefetch_are_followed() -> None:
    """Wrappers that are made by hand get theirs before there is a root around them."""
    torch.manual_seed(0)
    module = Routed(DEPTH)
    for index, block in enumerate(module.blocks):
        module.blocks[index] = ZeRO3(block, limit_all_gathers=1)
    blocks = module.blocks
    blocks[0].set_modules_to_forward_prefetch([blocks[1], blocks[2], blocks[3]])
    blocks[4].set_modules_to_backward_prefetch([blocks[3], blocks[2]])
    model = ZeRO3(module)
    for _ in range(2):
        with timeline() as seen:
            loss = model(own_batch(), ALL).sum()
        assert seen[:4] == ["g0", "g1", "g2", "g3"]
        with timeline() as seen:
            loss.backward()
        assert seen[:3] == ["g3", "g2", "u4"]
    with pytest.raises(ValueError, match="modules to prefetch must be units"):
        blocks[0].set_modules_to_forward_prefetch([nn.Linear(1, 1)])


@on_ranks(2)
def test_a_unit_unsharded_by_hand_is_reduced_where_it_was_used_outside_its_forward() -> None:
    model = zero3(lambda: Mlp(3), Block)
    unit = next(unit for unit in units(model) if unit.fqn == "blocks.1")
    unit.unshard()
    unit.module.up.weight.square().sum().backward()
    unit.reshard()
    weight = unit.module.up.weight
    assert weight.dim() == 1
    assert_bitwise(weight.grad, 2 * weight.detach())


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
    for _ in range(1 + dist.get_rank()):  # Nothing is gathered, so ranks may differ.
        with torch.no_grad():
            model(own_batch())
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
    # A second backward that fails does not keep them for a graph that is gone.
    earlier = model(x).sum()
    (gradient,) = torch.autograd.grad(model(x).tanh().sum(), x, create_graph=True)
    handle = x.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        gradient.pow(2).sum().backward()
    handle.remove()
    earlier.backward()
    assert _held(model) == {}
