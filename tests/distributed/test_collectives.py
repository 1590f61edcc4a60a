"""What a step costs: collectives counted, payload counted, copies counted, storage freed."""

import math
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from layerzero import ZeRO3
from layerzero.checkpoint import get_model_state_dict
from layerzero.comm import collectives
from layerzero.comm.collectives import reduce_scatter
from layerzero.comm.pending import Operation
from layerzero.flat.groups import make_shard_group
from layerzero.flat.placement import ShardGroup
from layerzero.memory_budget.storages import StorageCount
from layerzero.ops import ordered_sum_
from tests.harness.internals import root_state
from tests.harness.models import WIDTH, Block, Mlp
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
from tests.harness.reference import own_batch

DEPTH = 4


def wrapped(**options) -> ZeRO3:
    torch.manual_seed(0)
    return ZeRO3(Mlp(DEPTH), auto_wrap_policy={Block}, **options)


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
    torch.manual_seed(0)
    width = 64
    model = ZeRO3(
        torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(4))),
        auto_wrap_policy={torch.nn.Linear},
    )
    x = torch.randn(2, width)
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
    with count.watching():
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


class _Rare(nn.Module):
    """A layer beside frozen tables of dtypes that NCCL does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 3)
        bits = torch.arange(56, dtype=torch.uint8) + dist.get_rank()
        self.tables = nn.ParameterList(
            nn.Parameter(bits.clone().view(dtype), requires_grad=False) for dtype in RARE
        )
        self.register_buffer("counts", bits.view(torch.int16))

    def forward(self, x: Tensor) -> Tensor:
        for table in self.tables:
            assert torch.equal(table.view(torch.uint8), torch.arange(56, dtype=torch.uint8))
        return self.layer(x)


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
        model = ZeRO3(_Rare(), group, sync_module_states=True)
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
