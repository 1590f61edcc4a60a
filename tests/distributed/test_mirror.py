"""The mirror of tests/gpu is itself right, and sees wrong values: its branch on the CPU.

There are no streams here, so nothing is late and no wait can be missing.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch.distributed as dist

from layerzero.flat.flat_param import FlatParam
from tests.distributed import test_missing_waits
from tests.gpu import scenes
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
from tests.harness.ranks import run_ranks


def test_any_rank_of_any_world_trains_like_its_replica() -> None:
    each = worlds([*dict.fromkeys([*PLAIN_CASES, *USE_CASES])])
    found = run_ranks(1, run_worlds, "cpu", each, timeout=180)[0]
    assert_all_ran(found, sum(len(cases) for _, _, cases in each))
    assert total_wrong(found) == {}


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
    names = {defect.__name__ for defect, _, _, _ in test_missing_waits.ONE_GROUP}
    assert VISIBLE.keys() <= names and set(VISIBLE.values()) <= SETTINGS.keys()


def _scenes() -> dict[str, object]:
    """What tests/gpu runs on a GPU, as far as a CPU can go."""
    return {
        "verbs": [name for name, is_right in scenes.verbs("cpu").items() if not is_right],
        "wrong": sum(scenes.empty_cache_between("cpu", {"bfloat16": True}, 2, 24).values()),
        "allocations": scenes.allocations("cpu", 2),
        "busy": [scenes.host_goes_on("cpu", use)["busy"] for use in scenes.USES],
    }


def test_the_scenes_of_the_gpu_run_on_the_cpu() -> None:
    assert run_ranks(1, _scenes)[0] == {
        "verbs": [],
        "wrong": 0,
        "allocations": [0, 0],
        "busy": [True] * len(scenes.USES),
    }


def _one_of_two() -> int:
    return scenes.one_of_two("cpu", dist.get_rank(), "")


def test_two_ranks_train_like_the_replica() -> None:
    assert run_ranks(2, _one_of_two) == [0, 0]


def _fails() -> None:
    raise ValueError("on purpose")


def test_a_process_of_its_own_returns_fails_or_is_killed() -> None:
    assert in_process("math:hypot", 3, 4) == 5.0
    with pytest.raises(ProcessFailed, match=r"exit status 1(?s:.*)ValueError: on purpose"):
        in_process(f"{__name__}:_fails", timeout=60)
    with pytest.raises(ProcessFailed, match="killed after 1 s"):
        in_process("time:sleep", 60, timeout=1)
