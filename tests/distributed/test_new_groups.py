"""Groups that their members alone make: never split off a bound one, and with its options."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import Backend
from torch.distributed import distributed_c10d as c10d

from layerzero import ZeRO3
from layerzero.comm.new_groups import new_group, options_like
from layerzero.parallel import ParallelManager
from tests.harness.ranks import on_ranks, run_ranks

BOUND = torch.device("cuda", 0)


def _split_while(make: object) -> int:
    """How often torch asks whether to split the new communicator off the default group's."""
    dist.group.WORLD.bound_device_id = BOUND
    with mock.patch.object(c10d, "_get_split_source", return_value=None) as asked:
        make()
    assert dist.group.WORLD.bound_device_id == BOUND
    dist.group.WORLD.bound_device_id = None
    return asked.call_count


def _splits() -> dict[str, int]:
    rank = dist.get_rank()
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]

    def stage() -> None:
        # As pipeline stages with different layerings do: the other half makes no group.
        if rank < 2:
            ZeRO3(nn.Linear(4, 4), halves[0], zero3_size=1)

    found = {
        "a stage": _split_while(stage),
        "rows": _split_while(lambda: ZeRO3(nn.Linear(4, 4), zero3_size=2)),
        "the world": _split_while(lambda: new_group(range(4), "gloo")),
    }
    with mock.patch.object(c10d, "split_group", side_effect=AssertionError):
        manager = ParallelManager(dp_size=2, cp_size=2)
        found["a mesh"] = _split_while(lambda: manager.parallelize(nn.Linear(8, 8)))
    return found


def test_a_group_of_some_ranks_is_not_split_off_the_default_group() -> None:
    for found in run_ranks(4, _splits):
        # All ranks take part in a group of all, so there a split cannot hang.
        assert found == {"a stage": 0, "rows": 0, "the world": 1, "a mesh": 0}


@on_ranks(2)
def test_the_binding_comes_back_after_an_error() -> None:
    dist.group.WORLD.bound_device_id = BOUND
    with pytest.raises(ValueError, match="world size"):
        new_group([0, 1, 2], "gloo")
    assert dist.group.WORLD.bound_device_id == BOUND
    dist.group.WORLD.bound_device_id = None


class Options(Backend.Options):
    """As ProcessGroupNCCL.Options, as far as the engine looks."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        super().__init__("priority", timedelta(minutes=10))
        self.is_high_priority_stream = is_high_priority_stream
        self.config = "default"
        self.group_name = ""


def _group_with(options: object) -> Any:
    backend = SimpleNamespace(options=options)
    return SimpleNamespace(_get_backend=lambda device: backend)


def test_options_of_the_user_are_copied_without_the_groups_own() -> None:
    given = Options(is_high_priority_stream=True)
    given.config, given.group_name = "8 CTAs", "users"
    copied = options_like(_group_with(given), BOUND)
    assert copied is not given
    assert (copied.is_high_priority_stream, copied.config) == (True, "8 CTAs")
    assert copied.group_name == ""


def test_backends_without_such_options_get_none() -> None:
    assert options_like(_group_with(None), BOUND) is None
    assert options_like(_group_with(object()), BOUND) is None


def _passed_on() -> list[tuple[bool, str, timedelta]]:
    seen = []

    def create(given: object, options: Options) -> dist.Backend:
        seen.append((options.is_high_priority_stream, options.config, options._timeout))
        made = dist.ProcessGroupGloo(given.store, given.group_rank, given.group_size, given.timeout)
        keep[id(made)] = options
        return made

    keep: dict[int, object] = {}
    dist.Backend.register_backend("priority", create, extended_api=True, devices=["cpu"])
    chosen = Options(is_high_priority_stream=True)
    group = dist.new_group(timeout=timedelta(seconds=40), backend="priority", pg_options=chosen)
    # gloo's class has options of its own; a backend with NCCL's shows those it was made with.
    with mock.patch("layerzero.comm.new_groups._options_of", lambda group, device: chosen):
        ZeRO3(nn.Linear(4, 4), group, zero3_size=2)
    return seen


def _passed_on_by_meshes() -> set[tuple[int, bool]]:
    """(size, whether it is of high priority) of each group that is made."""
    seen = set()
    helper = c10d._new_process_group_helper

    def noting(size: int, *args: Any, backend_options: Options | None = None, **rest: Any) -> Any:
        seen.add((size, backend_options is not None and backend_options.is_high_priority_stream))
        return helper(size, *args, backend_options=backend_options, **rest)

    chosen = Options(is_high_priority_stream=True)
    with (
        mock.patch("layerzero.comm.new_groups._options_of", lambda group, device: chosen),
        mock.patch.object(c10d, "_new_process_group_helper", noting),
    ):
        ParallelManager(dp_size=2, cp_size=2).parallelize(nn.Linear(8, 8))
    return seen


def test_groups_of_meshes_get_the_options_of_the_default_group() -> None:
    for seen in run_ranks(4, _passed_on_by_meshes):
        assert {size for size, _ in seen} == {1, 2, 4}
        assert all(is_high for _, is_high in seen), seen


def test_groups_made_for_parts_get_the_options_of_the_whole() -> None:
    for whole, *parts in run_ranks(4, _passed_on):
        assert whole[:2] == (True, "default")
        assert parts == [(True, "default", timedelta(seconds=40))] * 2
