"""The mirror of tests/gpu is itself right, and sees wrong values: its branch on the CPU.

There are no streams here, so nothing is late and no wait can be missing. What NCCL and CUDA refuse,
or make the host wait for, stand-ins do here.
"""

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed import test_missing_waits
from tests.gpu import mirror, scenes, test_uses
from tests.gpu.mirror_runs import (
    PLAIN_CASES,
    SETTINGS,
    USE_CASES,
    assert_all_ran,
    run,
    run_worlds,
    total_wrong,
    worlds,
)
from tests.gpu.process import ProcessFailed, in_process
from tests.gpu.test_mirror import VISIBLE
from tests.harness import stream_uses
from tests.harness.internals import FlatParam
from tests.harness.ranks import on_ranks, run_ranks


class _Strict:
    """A process group that refuses, as NCCL does, tensors that are not contiguous."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._group, name)
        return functools.partial(self._checked, value) if callable(value) else value

    def _checked(self, verb: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for tensor in args:
            if isinstance(tensor, Tensor) and 0 in tensor.stride():
                raise ValueError("Tensors must be contiguous")
        return verb(*args, **kwargs)


def _run_strictly(worlds: Any) -> dict[str, Any]:
    make = mirror.one_rank_group
    with mock.patch.object(mirror, "one_rank_group", lambda device: _Strict(make(device))):
        return run_worlds("cpu", worlds)


def test_any_rank_of_any_world_trains_like_its_replica() -> None:
    each = worlds([*dict.fromkeys([*PLAIN_CASES, *USE_CASES])])
    found = run_ranks(1, _run_strictly, each, timeout=180)[0]
    assert_all_ran(found, sum(len(cases) for _, _, cases in each))
    assert total_wrong(found) == {}


class _Nccl:
    """Makes gloo where a CUDA build makes NCCL, which serves the tensors of its device alone."""

    Options = mock.Mock

    def __new__(cls, store: Any, rank: int, size: int, options: Any) -> Any:
        return dist.ProcessGroupGloo(store, rank, size, options._timeout)


@on_ranks(1)
def test_the_group_of_a_device_carries_the_small_exchanges_of_the_host() -> None:
    with mock.patch.object(dist, "ProcessGroupNCCL", _Nccl, create=True):
        group = mirror.one_rank_group(torch.device("cuda"))
    received = [torch.zeros(2)]
    group.allgather([received], [torch.ones(2)]).wait()
    assert received[0].tolist() == [1.0, 1.0]


def _with_a_shard_never_cast() -> dict:
    def forgets(param: FlatParam) -> None:
        param.version = param.main_shard._version

    with mock.patch.object(FlatParam, "write_compute_slice", forgets):
        return run("cpu", 3, 8, [("bfloat16", "plain")])


def _with_a_sum_for_a_mean() -> dict:
    with mock.patch.dict(SETTINGS, {"sum": stream_uses.SETTINGS["sum"]}):
        return run("cpu", 3, 8, [("sum", "plain")])


@pytest.mark.parametrize(
    ("broken", "seen"),
    [(_with_a_shard_never_cast, "shards"), (_with_a_sum_for_a_mean, "delivered")],
)
def test_wrong_values_are_seen(broken, seen: str) -> None:
    ((_, counted),) = run_ranks(1, broken)[0].items()
    assert counted["wrong"][seen] > 0


def test_every_visible_wait_is_one_that_the_simulation_takes_away() -> None:
    names = {name for name, *_ in test_missing_waits.rows(test_missing_waits.ONE_SHARD_GROUP)}
    assert VISIBLE.keys() <= names and set(VISIBLE.values()) <= SETTINGS.keys()


@on_ranks(1, timeout=120, fresh=True)
def test_each_use_gives_the_losses_of_plain_torch() -> None:
    names = [name for name, use in test_uses.USES.items() if not use.compiles]
    found = test_uses.differences("cpu", names)
    assert list(found) == names
    assert test_uses.wrong(found) == {}
    assert test_uses.wrong({"float32": 1e-9, "clip": float("nan"), "fused": "an error"}).keys() == {
        *("float32", "clip", "fused")
    }


@on_ranks(1, fresh=True)
def test_the_scenes_of_the_gpu_run_on_the_cpu() -> None:
    """What tests/gpu runs on a GPU, as far as a CPU can go."""
    assert all(scenes.verbs("cpu").values())
    assert not any(scenes.empty_cache_between("cpu", {"bfloat16": True}, 2, 24).values())
    assert scenes.allocations("cpu", 2) == [0, 0]
    assert all(scenes.host_goes_on("cpu", use)["busy"] for use in scenes.USES)


@on_ranks(2, fresh=True)
def test_two_ranks_train_like_the_replica() -> None:
    assert scenes.one_of_two("cpu", dist.get_rank(), "") == 0


@pytest.mark.slow
def test_a_process_of_its_own_returns_fails_or_is_killed() -> None:
    assert in_process("math:hypot", 3, 4) == 5.0
    with pytest.raises(ProcessFailed, match=r"exit status 1(?s:.*)IndexError: "):
        in_process("operator:getitem", [], 0)
    with pytest.raises(ProcessFailed, match="killed after 1 s"):
        in_process("time:sleep", 60, timeout=1)
