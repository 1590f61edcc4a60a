"""The mirror of tests/gpu is itself right, and sees wrong values: its branch on the CPU.

There are no streams here, so nothing is late and no wait can be missing.
"""

from __future__ import annotations

from unittest import mock

import pytest

from layerzero.core.flat_param import FlatParam
from tests.distributed import test_streams
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
from tests.gpu.test_mirror import VISIBLE
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
    with mock.patch.dict(SETTINGS, {"sum": test_streams.SETTINGS["sum"]}):
        return run("cpu", 3, 8, [("sum", "plain")])


@pytest.mark.parametrize(
    ("broken", "seen"),
    [(_with_a_shard_never_cast, "shards"), (_with_a_sum_for_a_mean, "delivered")],
)
def test_wrong_values_are_seen(broken, seen: str) -> None:
    ((_, counted),) = run_ranks(1, broken)[0].items()
    assert counted["wrong"][seen] > 0


def test_every_visible_wait_is_one_that_the_simulation_takes_away() -> None:
    names = {missing.__name__ for missing, _ in test_streams.MISSING}
    assert VISIBLE.keys() <= names and set(VISIBLE.values()) <= SETTINGS.keys()
