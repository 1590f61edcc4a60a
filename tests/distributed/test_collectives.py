"""What a step costs: collectives counted, payload counted, copies counted, storage freed."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from layerzero import MixedPrecision, ZeRO3, units
from layerzero.config import GatherBudget
from layerzero.step.unit import ShardState
from tests.harness.internals import root_state
from tests.harness.models import WIDTH, Block, Mlp
from tests.harness.ranks import run_ranks
from tests.harness.recording import (
    full_nbytes,
    gathered,
    gradient_nbytes,
    recorded_operations,
    reduced,
)
from tests.harness.traffic import SentBytes

DEPTH = 4


def wrapped(**options) -> ZeRO3:
    torch.manual_seed(0)
    return ZeRO3(Mlp(DEPTH), auto_wrap_policy={Block}, **options)


def batch() -> torch.Tensor:
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))


def _counts() -> None:
    model = wrapped()
    num_units = DEPTH + 1
    for _ in range(3):
        with recorded_operations(model) as operations:
            model(batch()).sum().backward()
        blocks = [f"blocks.{i}" for i in range(DEPTH)]
        assert gathered(operations) == ["the root unit", *blocks, *reversed(blocks)]
        assert len(gathered(operations)) == 2 * num_units - 1
        assert sorted(reduced(operations)) == sorted([*blocks, "the root unit"])
        others = {o.verb for o in operations} - {"all-gather", "reduce-scatter"}
        assert others == {"gradient presence"}


def test_a_step_gathers_2u_minus_1_times_and_reduces_u_times() -> None:
    run_ranks(2, _counts)


def _blocks_alone() -> None:
    torch.manual_seed(0)
    model = ZeRO3(torch.nn.Sequential(*(Block() for _ in range(DEPTH))), auto_wrap_policy={Block})
    for _ in range(2):
        with recorded_operations(model) as operations:
            model(batch()).sum().backward()
        assert len(gathered(operations)) == 2 * DEPTH - 1
        assert len(reduced(operations)) == DEPTH


def test_a_root_without_parameters_costs_nothing() -> None:
    run_ranks(2, _blocks_alone)


def _keeps_params() -> None:
    model = wrapped(reshard_after_forward=False)
    with recorded_operations(model) as operations:
        model(batch()).sum().backward()
    assert len(gathered(operations)) == DEPTH + 1
    assert set(full_nbytes(model).values()) == {0}


def test_without_resharding_after_forward_each_unit_is_gathered_once() -> None:
    run_ranks(2, _keeps_params)


def _eval_counts() -> None:
    model = wrapped()
    with torch.no_grad(), recorded_operations(model) as operations:
        model(batch())
    assert len(gathered(operations)) == DEPTH + 1
    assert set(full_nbytes(model).values()) == {0}, "nothing stays after a forward without grad"


def test_a_forward_without_grad_gathers_each_unit_once_and_keeps_none() -> None:
    run_ranks(2, _eval_counts)


def _payload() -> None:
    torch.manual_seed(0)
    width = 256
    model = ZeRO3(
        torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(3))),
        auto_wrap_policy={torch.nn.Linear},
    )
    with SentBytes() as sent:
        model(torch.randn(4, width)).sum().backward()
    parameters = sum(unit.num_parameters for unit in units(model)) * 4
    # Each rank sends its half of every gather, and half of every gradient.
    gathers = parameters * (2 * 3 - 1) / 3 / 2
    presence = 2 * 3
    assert sent.nbytes >= gathers + parameters / 2
    assert sent.nbytes - presence <= 1.001 * (gathers + parameters / 2)


def test_the_payload_is_the_parameters_and_less_than_a_thousandth_padding() -> None:
    run_ranks(2, _payload)


def _storages() -> None:
    model = wrapped()
    scheduler = root_state(model).scheduler
    residents: list[int] = []
    original = scheduler.unshard_for_call

    def watching(unit, in_backward: bool) -> None:
        original(unit, in_backward)
        residents.append(sum(nbytes > 0 for nbytes in full_nbytes(model).values()))

    scheduler.unshard_for_call = watching
    for _ in range(3):
        loss = model(batch()).sum()
        kept = {fqn for fqn, nbytes in full_nbytes(model).items() if nbytes}
        assert kept == {""}, "only the last unit of the forward, the root, stays"
        loss.backward()
        assert set(full_nbytes(model).values()) == {0}
        assert set(gradient_nbytes(model).values()) == {0}
        for parameter in model.parameters():
            assert parameter.grad is not None
        model.zero_grad()
    assert max(residents) <= 3, "the root, the unit in use, and the one ahead"


def test_full_parameters_and_gradients_are_freed_when_they_were_used() -> None:
    run_ranks(2, _storages)


def _copies() -> None:
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


def _numel(shape) -> int:
    numel = 1
    for size in shape:
        numel *= size if isinstance(size, int) else 1
    return numel if shape else 0


def _enclosing_label(event) -> str:
    while event is not None:
        if event.name.startswith("LayerZeRO3."):
            return event.name
        event = event.cpu_parent
    return ""


def test_an_unshard_copies_no_parameter_and_a_gradient_is_copied_once() -> None:
    run_ranks(2, _copies)


def _labels() -> None:
    model = wrapped()
    model(batch()).sum().backward()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        model(batch()).sum().backward()
    names = {event.name for event in profiler.events()}
    for action in ("unshard", "reshard", "reduce", "prefetch", "wait_for_unshard"):
        assert f"LayerZeRO3.{action}(blocks.1)" in names
    # What was prefetched is told from what was demanded: gathers are inside.
    begins = {event.name: event for event in profiler.events()}
    ahead, gather = (begins[f"LayerZeRO3.{name}(blocks.1)"] for name in ("prefetch", "unshard"))
    assert gather.cpu_parent is ahead
    assert not any(name.startswith("LayerZeRO3.budget_full") for name in names)
    root_state(model).context.limiter.budget = GatherBudget(max_units=1)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        model(batch()).sum().backward()
    names = {event.name for event in profiler.events()}
    assert "LayerZeRO3.budget_full(blocks.1)" in names
    assert not any(name.startswith("LayerZeRO3.prefetch") for name in names)


def test_the_profiler_shows_what_happens_to_which_unit() -> None:
    run_ranks(2, _labels)


def _cast() -> None:
    model = wrapped(mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
    nbytes = {unit.fqn: unit.nbytes for unit in units(model)}
    full = {unit.fqn: unit.num_parameters for unit in units(model)}
    assert all(full[fqn] * 2 <= nbytes[fqn] <= full[fqn] * 2 + 256 for fqn in full)


def test_gathers_travel_in_the_compute_dtype() -> None:
    run_ranks(2, _cast)


def _states() -> None:
    model = wrapped()
    assert {unit.state for unit in units(model)} == {ShardState.SHARDED}
    model(batch())
    assert [unit.fqn for unit in units(model)] == ["", *(f"blocks.{i}" for i in range(DEPTH))]


def test_units_begin_sharded_and_are_all_listed() -> None:
    run_ranks(2, _states)
