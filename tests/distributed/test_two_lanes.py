"""Reductions on process groups of their own, and several in flight, within the bound of memory.

Random models train with them, experts among these, and test_streams.py looks at their accesses.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from layerzero import MixedPrecision, ReductionPolicy, ZeRO3
from layerzero.step.reducer import GradientReducer
from layerzero.step.unit import Unit
from tests.harness.fake_ranks import as_fake_ranks
from tests.harness.internals import root_state
from tests.harness.models import Block, Mlp
from tests.harness.ranks import on_ranks
from tests.harness.recording import observed, waiting_nbytes
from tests.harness.reference import seeded
from tests.harness.simulated_device import simulated_device
from tests.harness.stream_uses import train, wrapped

LAYERS: dict[str, dict[str, Any]] = {
    "one group": {},
    "zero1": {"zero3_size": 2, "mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)},
    "replicate": {"zero3_size": 2, "outer": "replicate"},
    "shard": {"zero3_size": 2, "outer": "shard", "reshard_after_forward": "compute_shard"},
    "whole parameters": {"zero3_size": 1, "outer": "replicate"},
}


def _groups_used(layers: dict[str, Any], separate: bool) -> dict[str, set[dist.ProcessGroup]]:
    model = ZeRO3(
        seeded(lambda: Mlp(3)),
        auto_wrap_policy={Block},
        reduction=ReductionPolicy(separate_groups=separate),
        **layers,
    )
    used: dict[str, set[dist.ProcessGroup]] = {"gathers": set(), "reductions": set()}
    operations = root_state(model).operations

    def note(verb: str, unit: str, group: Any) -> None:
        # The outer gather of a forward brings weights, that of a reduction gradients.
        in_backward = root_state(model).context.in_backward
        if verb in ("reduce-scatter", "outer reduce-scatter"):
            used["reductions"].add(group.process_group)
        elif verb == "all-gather" or (verb == "outer all-gather" and not in_backward):
            used["gathers"].add(group.process_group)
        elif verb == "outer all-gather":
            used["reductions"].add(group.process_group)

    with observed(operations, "next", note):
        train(model, 1)
    return used


@on_ranks(4, timeout=180)
def test_reductions_have_groups_of_their_own_over_the_same_ranks() -> None:
    for name, layers in LAYERS.items():
        shared, apart = (_groups_used(layers, separate) for separate in (False, True))
        assert not apart["gathers"] & apart["reductions"], name
        if name in ("one group", "zero1"):
            assert shared["gathers"] & shared["reductions"], name
        # Over the same ranks.
        ranks = [
            sorted(dist.get_process_group_ranks(group) for group in used["reductions"])
            for used in (shared, apart)
        ]
        assert ranks[0] == ranks[1], name


def _groups_are_kept() -> None:
    before = len(dist.distributed_c10d._world.pg_names)
    for _ in range(2):
        ZeRO3(nn.Linear(4, 4), reduction=ReductionPolicy(separate_groups=True))
    # One for the first model, and the second uses it again.
    assert len(dist.distributed_c10d._world.pg_names) == before + 1
    alone = ZeRO3(
        nn.Linear(4, 4),
        zero3_size=1,
        outer="replicate",
        reduction=ReductionPolicy(separate_groups=True),
    )
    assert all(group.size > 1 for group in root_state(alone).units[0].handles[0].placement.groups)


@contextmanager
def counted_in_flight(model: ZeRO3) -> Iterator[list[tuple[int, int]]]:
    """(units whose reduction is in flight, bytes that these hold), after each unit's start."""
    seen: list[tuple[int, int]] = []

    def count(_: None, reducer: GradientReducer, unit: Unit) -> None:
        units = {reduction.unit for reduction in reducer._in_flight}
        nbytes = sum(
            waiting_nbytes(handle.gradients)
            for unit in root_state(model).units
            for handle in unit.handles
        )
        seen.append((len(units), nbytes))

    with observed(GradientReducer, "reduce", after=count):
        yield seen


def _input_nbytes(model: ZeRO3) -> list[int]:
    return [
        sum(handle.gradients.in_flight_nbytes for handle in unit.handles)
        for unit in root_state(model).units
    ]


def _count(bound: int | None, most: int) -> None:
    """As many reductions are in flight in a backward as there is room for."""
    with simulated_device():
        text = None if bound is None else f"{bound}B"
        model = wrapped(reduction=ReductionPolicy(in_flight=text))
        train(model, 2)
        with counted_in_flight(model) as seen:
            train(model, 1)
    assert max(number for number, _ in seen) == most
    assert len(seen) == 4
    assert bound in (None, 1) or max(nbytes for _, nbytes in seen) <= bound


@as_fake_ranks((0, 1), 2)
def test_as_many_reductions_are_in_flight_as_there_is_room_for() -> None:
    with simulated_device():
        sizes = _input_nbytes(wrapped())
    for bound, most in ((None, 1), (1, 1), (sum(sorted(sizes)[-2:]), 2), (sum(sizes), 4)):
        _count(bound, most)


def _twice_in_a_pass() -> None:
    """Reentrant checkpoints run a backward inside a backward: a unit may be reduced in both."""
    model = ZeRO3(nn.Linear(4, 4), reduction=ReductionPolicy(in_flight="1GB"))
    (unit,) = root_state(model).units
    reducer = root_state(model).reducer
    model(torch.ones(2, 4)).sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    reduce = reducer.reduce

    def twice(unit: Unit) -> None:
        reduce(unit)
        assert reducer._in_flight
        reduce(unit)
        assert len(reducer._in_flight) == len(unit.handles)

    with mock.patch.object(reducer, "reduce", twice):
        model(torch.ones(2, 4)).sum().backward()
    assert unit.handles
    for parameter, value in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, value)


@on_ranks(2, fresh=True)
def test_groups_are_made_once_and_a_unit_may_be_reduced_twice_in_a_pass() -> None:
    """On new ranks, which have made no group yet."""
    _groups_are_kept()
    _twice_in_a_pass()
