"""Process groups that the engine makes: by their members alone, with the options of the whole, with
names that agree where ranks know different numbers of other groups, and with timeouts that keep
what a user chose; and reductions on groups of their own, several in flight, within the bound of
memory.

Random models train with these, experts among them, and test_streams.py looks at their accesses.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import Backend
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh

from layerzero import GradScaler, MixedPrecision, ReductionPolicy, ZeRO3, checkpoint
from layerzero.parallel import ParallelManager
from layerzero.state_dict.checkpoint_group import checkpoint_group_of
from tests.harness.compare import assert_trains_alike, zero3
from tests.harness.fake_ranks import as_fake_ranks
from tests.harness.internals import (
    BACKEND_GRACE,
    GradientReducer,
    Unit,
    get_unit,
    new_group,
    root_state,
)
from tests.harness.models import Block, Mlp
from tests.harness.plain_backend import make_plain_group
from tests.harness.ranks import on_ranks
from tests.harness.recording import observed, waiting_nbytes
from tests.harness.reference import seeded
from tests.harness.simulated_device import simulated_device
from tests.harness.stream_uses import train, wrapped

BOUND = torch.device("cuda", 0)


def _split_while(make: object) -> int:
    """How often torch asks whether to split the new communicator off the default group's."""
    dist.group.WORLD.bound_device_id = BOUND
    with mock.patch.object(c10d, "_get_split_source", return_value=None) as asked:
        make()
    assert dist.group.WORLD.bound_device_id == BOUND
    dist.group.WORLD.bound_device_id = None
    return asked.call_count


@on_ranks(4, fresh=True)
def test_a_group_of_some_ranks_is_not_split_off_the_default_group() -> None:
    rank = dist.get_rank()
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]

    def stage() -> None:
        # As pipeline stages with different layerings do: the other half makes no group.
        if rank < 2:
            ZeRO3(nn.Linear(4, 4), halves[0], zero3_size=1)

    found = {
        "a stage": _split_while(stage),
        "rows": _split_while(lambda: ZeRO3(nn.Linear(4, 4), zero3_size=2)),
        "the world": _split_while(lambda: new_group(range(4), "gloo", timedelta(minutes=1))),
    }
    with mock.patch.object(c10d, "split_group", side_effect=AssertionError):
        manager = ParallelManager(dp_size=2, cp_size=2)
        found["a mesh"] = _split_while(lambda: manager.parallelize(nn.Linear(8, 8)))
    # All ranks take part in a group of all, so there a split cannot hang.
    assert found == {"a stage": 0, "rows": 0, "the world": 1, "a mesh": 0}


class Options(Backend.Options):
    """As ProcessGroupNCCL.Options, as far as the engine looks."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        super().__init__("priority", timedelta(minutes=10))
        self.is_high_priority_stream = is_high_priority_stream
        self.config = "default"
        self.group_name = ""


@on_ranks(4, fresh=True)
def test_groups_of_meshes_and_parts_get_the_options_of_the_whole() -> None:
    """A backend with NCCL's options shows those that it was made with; gloo's are its own."""
    chosen, seen = Options(is_high_priority_stream=True), []

    def note(size: int, *_: Any, backend_options: Any = None, **__: Any) -> None:
        is_high = isinstance(backend_options, Options) and backend_options.is_high_priority_stream
        seen.append((size, is_high and backend_options.config, backend_options._timeout))

    whole = dist.new_group(timeout=timedelta(seconds=40))
    with (
        mock.patch("layerzero.comm.new_groups.options_of", lambda group, device: chosen),
        observed(c10d, "_new_process_group_helper", note),
    ):
        ParallelManager(dp_size=2, cp_size=2).parallelize(nn.Linear(8, 8))
        of_meshes = seen[:]
        seen.clear()
        ZeRO3(nn.Linear(4, 4), whole, zero3_size=2)
    # That of all four is the default group.
    assert {(size, config) for size, config, _ in of_meshes} == {(1, "default"), (2, "default")}
    assert seen == [(2, "default", timedelta(seconds=40))] * 2


def _a_group_for_some(ranks: list[int]) -> None:
    """As scripts make them: everybody calls, only members know it from then on."""
    dist.new_group(ranks)


@on_ranks(4)
def test_groups_that_only_some_ranks_know_do_not_matter(tmp_path: Path) -> None:
    """Groups have the ranks that they should have: models train as in plain torch."""
    _a_group_for_some([0, 1])
    for outer, group in (("zero1", None), ("shard", dist.group.WORLD)):
        model = zero3(Mlp, zero3_size=2, outer=outer)
        assert_trains_alike(model, seeded(Mlp), regrouped=outer == "zero1")
        _a_group_for_some([3])
        checkpoint.save(tmp_path, model, process_group=group)
        _a_group_for_some([0, 2])
    manager = ParallelManager(dp_size=2, cp_size=2)
    assert_trains_alike(manager.parallelize(seeded(Mlp)), seeded(Mlp))


CPU = torch.device("cpu")
TORCH_DEFAULT = timedelta(minutes=30)


def timeouts(model: ZeRO3) -> set[timedelta]:
    placement = get_unit(model).handles[0].placement
    groups = (placement.shard_group, placement.outer_group, placement.post_forward_group)
    return {group.timeout for group in groups if group is not None}


def backend_timeout(group: dist.ProcessGroup) -> timedelta:
    return group._get_backend(CPU).options._timeout


@on_ranks(1, fresh=True)
def test_a_timeout_given_to_a_process_group_is_kept(tmp_path: Path) -> None:
    for number, (given, expected) in enumerate(
        {
            None: timedelta(minutes=5),
            timedelta(hours=2): timedelta(hours=2),
            timedelta(seconds=40): timedelta(seconds=40),
        }.items()
    ):
        dist.destroy_process_group()
        dist.init_process_group(
            "gloo", init_method=f"file://{tmp_path}/{number}", rank=0, world_size=1, timeout=given
        )
        assert timeouts(ZeRO3(nn.Linear(2, 2))) == {expected}
        # A group that was given none follows the default group.
        assert timeouts(ZeRO3(nn.Linear(2, 2), dist.new_group([0]))) == {expected}
        own = dist.new_group([0], timeout=timedelta(hours=1))
        assert timeouts(ZeRO3(nn.Linear(2, 2), own)) == {timedelta(hours=1)}
        chosen = timedelta(seconds=7)
        assert timeouts(ZeRO3(nn.Linear(2, 2), own, timeout=chosen)) == {chosen}


@on_ranks(2, fresh=True)
def test_groups_made_for_parts_and_meshes_have_the_timeout_of_the_whole() -> None:
    hours, seconds, world = (
        timedelta(hours=2),
        timedelta(seconds=7),
        backend_timeout(dist.group.WORLD),
    )
    group = dist.new_group(timeout=hours)
    for outer in ("zero1", "replicate", "shard"):
        # Groups that are made for parts are used again, with the timeout of each model.
        for given, expected in ((seconds, seconds), (None, hours)):
            model = ZeRO3(nn.Linear(4, 4), group, zero3_size=1, outer=outer, timeout=given)
            assert timeouts(model) == {expected}, outer
            assert checkpoint_group_of(root_state(model), None).timeout == expected
    # Of two groups that a save may use, the longer.
    model = ZeRO3(nn.Linear(4, 4), timeout=seconds)
    assert checkpoint_group_of(root_state(model), group).timeout == hours
    mesh = init_device_mesh("cpu", (2, 1))
    assert backend_timeout(mesh.get_group(1)) in (TORCH_DEFAULT, world)
    assert timeouts(ZeRO3(nn.Linear(4, 4), mesh)) == {world}


@on_ranks(2, fresh=True)
def test_a_users_group_never_waits_less_than_before() -> None:
    own, shorter, longer = (timedelta(seconds=number) for number in (40, 3, 50))
    group = make_plain_group(own)
    ZeRO3(nn.Linear(4, 4), group, timeout=shorter)
    scaler = GradScaler("cpu", process_group=group, timeout=shorter)
    parameter = nn.Parameter(torch.ones(3))
    scaler.scale(parameter.sum()).backward()
    scaler.step(torch.optim.SGD([parameter], lr=0.1))
    assert backend_timeout(group) == own
    # One that the engine has to have waits longer, and is still known by what it was given.
    ZeRO3(nn.Linear(4, 4), group, timeout=longer)
    assert backend_timeout(group) == longer + BACKEND_GRACE
    assert timeouts(ZeRO3(nn.Linear(4, 4), group)) == {own}


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
