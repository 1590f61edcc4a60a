"""What a step costs: collectives counted, payload counted, copies counted, storage freed. When
units are gathered: recorded order, depth, lists, budget; and never a wrong one. Why a unit stays
full is written on it, and it is freed when no reason is left."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from layerzero import (
    BackwardPrefetch,
    Hold,
    ShardingPlan,
    ZeRO3,
    fully_shard,
    shard_with_plan,
    units,
)
from layerzero.checkpoint import get_model_state_dict
from layerzero.memory_budget.storages import CountingMode, StorageCount
from layerzero.ops import ordered_sum_
from tests.harness.checks import assert_bitwise, named
from tests.harness.compare import linears, zero3
from tests.harness.internals import (
    Operation,
    ShardGroup,
    ShardState,
    Unit,
    collectives,
    make_shard_group,
    reduce_scatter,
    root_state,
)
from tests.harness.models import WIDTH, Block, Mlp, Parts, Routed
from tests.harness.plain_backend import make_plain_group
from tests.harness.ranks import on_ranks
from tests.harness.recording import (
    full_nbytes,
    gathered,
    gradient_nbytes,
    observed,
    recorded_operations,
    reduced,
)
from tests.harness.reference import own_batch, seeded

DEPTH = 4


wrapped = partial(zero3, partial(Mlp, DEPTH), Block)


@on_ranks(2)
def test_a_step_gathers_2u_minus_1_times_and_reduces_u_times() -> None:
    model = wrapped()
    num_units = DEPTH + 1
    for _ in range(3):
        with recorded_operations(model) as operations:
            model(own_batch(rows=5)).sum().backward()
        blocks = [f"blocks.{i}" for i in range(DEPTH)]
        assert gathered(operations) == ["the root unit", *blocks, *reversed(blocks)]
        assert len(gathered(operations)) == 2 * num_units - 1
        assert sorted(reduced(operations)) == sorted([*blocks, "the root unit"])
        others = {o.verb for o in operations} - {"all-gather", "reduce-scatter"}
        assert others == {"gradient presence"}

    # A root without parameters costs nothing.
    model = ZeRO3(torch.nn.Sequential(*(Block() for _ in range(DEPTH))), auto_wrap_policy={Block})
    with recorded_operations(model) as operations:
        model(own_batch(rows=5)).sum().backward()
    assert len(gathered(operations)) == 2 * DEPTH - 1
    assert len(reduced(operations)) == DEPTH


@on_ranks(2)
def test_what_stays_full_or_has_no_backward_is_gathered_once() -> None:
    for kept in (False, True):
        model = wrapped(reshard_after_forward=not kept)
        with torch.set_grad_enabled(kept), recorded_operations(model) as operations:
            loss = model(own_batch(rows=5)).sum()
            if kept:
                loss.backward()
        assert len(gathered(operations)) == DEPTH + 1
        assert set(full_nbytes(model).values()) == {0}, "nothing stays"


@on_ranks(2)
def test_full_parameters_and_gradients_are_freed_when_they_were_used() -> None:
    model = wrapped()
    scheduler = root_state(model).scheduler
    residents: list[int] = []

    def count(*_: Any, **__: Any) -> None:
        residents.append(sum(nbytes > 0 for nbytes in full_nbytes(model).values()))

    with observed(scheduler, "unshard_for_call", after=count):
        for _ in range(3):
            loss = model(own_batch(rows=5)).sum()
            kept = {fqn for fqn, nbytes in full_nbytes(model).items() if nbytes}
            assert kept == {""}, "only the last unit of the forward, the root, stays"
            loss.backward()
            assert set(full_nbytes(model).values()) == {0}
            assert set(gradient_nbytes(model).values()) == {0}
            for parameter in model.parameters():
                assert parameter.grad is not None
            model.zero_grad()
    assert max(residents) <= 3, "the root, the unit in use, and the one ahead"


def _numel(shape) -> int:
    return math.prod(size for size in shape if isinstance(size, int)) if shape else 0


def _enclosing_label(event) -> str:
    while event is not None:
        if event.name.startswith("LayerZeRO3."):
            return event.name
        event = event.cpu_parent
    return ""


@on_ranks(2)
def test_an_unshard_copies_no_parameter_and_a_gradient_is_copied_once() -> None:
    width = 64
    model, x = linears(4, width), torch.randn(2, width)
    for _ in range(2):
        model(x).sum().backward()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        model(x).sum().backward()
    copies = {"layerzero::pack_", "aten::copy_", "aten::_foreach_copy_", "aten::clone", "aten::cat"}
    numel = width * width
    per_unshard, per_gradient = 0, 0
    for event in profiler.events():
        if event.name not in copies:
            continue
        # Nested events (pack_ without its kernel, or a foreach copy) count once.
        parent = event.cpu_parent
        if parent is not None and parent.name in copies:
            continue
        biggest = max((_numel(shape) for shape in event.input_shapes), default=0)
        name = _enclosing_label(event)
        if biggest >= numel and "unshard" in name:
            per_unshard += 1
        if "reduce" in name:
            assert event.name == "layerzero::pack_"
            per_gradient += 1
    assert per_unshard == 0
    assert per_gradient == 4, "one copy for each gradient"


@on_ranks(2)
def test_the_profiler_shows_what_happens_to_which_unit() -> None:
    model = wrapped()
    seen = [_labels(model), _labels(wrapped(limit_all_gathers=1))]
    for action in ("unshard", "reshard", "reduce", "prefetch", "wait_for_unshard"):
        assert f"LayerZeRO3.{action}(blocks.1)" in seen[0]
    # What was prefetched is told from what was demanded: gathers are inside.
    ahead, gather = (seen[0][f"LayerZeRO3.{name}(blocks.1)"] for name in ("prefetch", "unshard"))
    assert gather.cpu_parent is ahead
    assert not any(name.startswith("LayerZeRO3.budget_full") for name in seen[0])
    assert "LayerZeRO3.budget_full(blocks.1)" in seen[1]
    assert not any(name.startswith("LayerZeRO3.prefetch") for name in seen[1])


def _labels(model: ZeRO3) -> dict[str, Any]:
    """Events of a step that knows its order, by name."""
    model(own_batch(rows=5)).sum().backward()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        model(own_batch(rows=5)).sum().backward()
    return {event.name: event for event in profiler.events()}


# Their bits, and what they hold: see Note [Parts arrive where others have left].

NUMEL = 1001
LIMIT = timedelta(minutes=2)
PARTS = {2: 1, 3: 2, 4: 2, 6: 3, 9: 4}
"""Group size -> parts of memory that a reduction gets beside its input."""


def world() -> ShardGroup:
    assert dist.group.WORLD is not None
    return make_shard_group(dist.group.WORLD, torch.device("cpu"), LIMIT)


def chunks_of(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """[size * NUMEL]; sums of them depend on the order."""
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(size * NUMEL, generator=generator) * 10.0 ** (3 * (rank % 3))
    return values.to(dtype)


@pytest.mark.parametrize("world_size", PARTS)
@on_ranks()
def test_sums_have_the_bits_of_a_sum_in_rank_order_and_take_little_memory(world_size: int) -> None:
    group = world()
    size = group.size
    rising, falling = list(range(size)), list(range(size))[::-1]
    number = 0
    for dtype in (torch.float32, torch.bfloat16, torch.complex64):
        for order in (None, falling):
            number += 1
            operation = Operation("reduce-scatter", "a unit", number)
            given = chunks_of(group.rank, size, dtype)
            summed, pending = reduce_scatter(given, group, operation, 1 / size, order=order)
            pending.wait()
            place = (order or rising)[group.rank]
            parts = [chunks_of(rank, size, dtype).chunk(size)[place] for rank in range(size)]
            wanted = ordered_sum_(torch.empty_like(summed), parts, 1 / size)
            assert torch.equal(summed, wanted), (dtype, order)
    count = StorageCount()
    with CountingMode(count):
        given = torch.zeros(size * NUMEL)
        operation = Operation("reduce-scatter", "a unit", number + 1)
        summed, pending = reduce_scatter(given, group, operation)
        pending.wait()
        del given
        held = summed.numel()
        assert held == summed.untyped_storage().nbytes() // 4, "no view keeps the input alive"
    assert count.peak == 4 * NUMEL * (size + PARTS[size])


NCCL = {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool}
NCCL |= {torch.uint8, torch.int8, torch.int32, torch.int64}
RARE = (torch.int16, torch.uint16, torch.complex64, torch.float8_e4m3fn)


def _rare() -> nn.Module:
    """A layer beside frozen tables of dtypes that NCCL does not have."""
    bits = torch.arange(56, dtype=torch.uint8) + dist.get_rank()
    tables = [nn.Parameter(bits.clone().view(dtype), requires_grad=False) for dtype in RARE]

    def run(own: nn.Module, x: Tensor) -> Tensor:
        for table in own.tables:
            assert torch.equal(table.view(torch.uint8), torch.arange(56, dtype=torch.uint8))
        return own.layer(x)

    counts = nn.Buffer(bits.view(torch.int16))
    return Parts(run, layer=nn.Linear(WIDTH, 3), tables=nn.ParameterList(tables), counts=counts)


def _refusing(verb: Callable[..., Any]) -> Callable[..., Any]:
    def checked(*args: Any, **kwargs: Any) -> Any:
        for given in args:
            assert not isinstance(given, Tensor) or given.dtype in NCCL, given.dtype
        return verb(*args, **kwargs)

    return checked


@on_ranks(2)
def test_what_a_backend_cannot_send_is_sent_as_bytes() -> None:
    gather = collectives._ALL_GATHER
    original = getattr(dist.ProcessGroup, gather)
    with (
        mock.patch.object(dist.ProcessGroup, gather, _refusing(original)),
        mock.patch.object(dist, "broadcast", _refusing(dist.broadcast)),
    ):
        group = make_plain_group(timedelta(seconds=30))
        model = ZeRO3(_rare(), group, sync_module_states=True)
        for _ in range(2):
            model(torch.ones(2, WIDTH)).sum().backward()
        with model.summon_full_params(rank0_only=True):
            pass
        full = get_model_state_dict(model, full=True)
    if dist.get_rank() == 0:
        for index, dtype in enumerate(RARE):
            table = full[f"tables.{index}"]
            assert table.dtype is dtype and table.view(torch.uint8).tolist() == list(range(56))
    assert model.counts.view(torch.uint8).tolist() == list(range(56))


routed = partial(Routed, 5)
chain = partial(zero3, routed, Block)
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
        model = chain(forward_prefetch=depth)
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
        (BackwardPrefetch.BACKWARD_PRE, "g3 u4 g2 u3 g1 u2 g0 u1 u0", "g3 r4 g2 r3 g1 r2 g0 r1 r0"),
        (
            BackwardPrefetch.BACKWARD_POST,
            "u4 g3 u3 g2 u2 g1 u1 g0 u0",
            "g3 r4 g2 r3 g1 r2 g0 r1 r0",
        ),
    ):
        model = chain(backward_prefetch=mode)
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
    model = chain(forward_prefetch=3)
    routes = ["0 1 2", "0 3 4", "0 1 2", "0 3 4", ALL, "0 3 4", "0 1 2"]
    reference = seeded(routed)
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
    plain, plan = chain(), ShardingPlan(apply_modules=["blocks.{*}"], pregather=True)
    model = shard_with_plan(seeded(routed), plan)
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
    model = chain(forward_prefetch=4, limit_all_gathers=limit)
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
    module = seeded(routed)
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
