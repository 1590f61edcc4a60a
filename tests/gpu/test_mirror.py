"""Values are those of plain training, on any rank of any world, with streams that come late.

tests/distributed/test_mirror.py runs the same on the CPU.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.gpu.mirror_runs import EVERY_CASE, assert_all_ran, total_wrong, worlds
from tests.gpu.process import ProcessFailed, in_process

pytestmark = pytest.mark.gpu

SLEEP_CYCLES = 20_000_000
"""At most about 10 ms: the host needs less for a unit, so it runs ahead of the device."""
VISIBLE = {
    "without_waiting_for_marks": "default",
    "without_waiting_for_gathers": "default",
    "without_the_event_of_weights": "bfloat16",
    "without_a_new_event_of_weights": "bfloat16",
    "without_the_unshard_stream_waiting": "default",
    "without_compute_waiting_for_unsharded_parameters": "default",
    "without_compute_waiting_for_reductions": "default",
    "without_waiting_before_frees": "default",
    "without_the_event_of_collected_gradients": "default",
}
"""Waits whose absence changes a value, and a setting that has them. Others of missing_waits.py
order an access before memory leaves its pool (test_memory.py), need a second device, or wait for a
stream of the backend, which on NCCL is the engine's own."""


@pytest.mark.parametrize("sleep_cycles", [0, SLEEP_CYCLES], ids=["at once", "late"])
def test_any_rank_of_any_world_trains_like_its_replica(sleep_cycles: int) -> None:
    each = worlds(EVERY_CASE)
    found = in_process("tests.gpu.mirror_runs:run_worlds", "cuda", each, sleep_cycles, timeout=200)
    assert_all_ran(found, sum(len(cases) for _, _, cases in each))
    assert total_wrong(found) == {}


def is_sighting(error: str) -> bool:
    """Whether a missing wait can have caused it: a stray access, or a gather that comes late.

    A gather that writes while the forward runs looks to the engine as if the model wrote.
    """
    return "CUDA error" in error or "the forward wrote into the full parameters" in error


def _without(missing: str) -> bool:
    """Whether anything shows that the wait is missing."""
    cases = [(VISIBLE[missing], "plain")]
    run = ("tests.gpu.mirror_runs:run", "cuda", 3, 8, cases, SLEEP_CYCLES, missing)
    try:
        return bool(total_wrong(in_process(*run, timeout=90)))
    except ProcessFailed as error:
        if not is_sighting(str(error)):
            raise
        return True


def test_a_missing_wait_is_seen() -> None:
    """In a process each, which may die of it, and at once: they mostly start and sleep."""
    with ThreadPoolExecutor(len(VISIBLE)) as pool:
        found = dict(zip(VISIBLE, pool.map(_without, VISIBLE), strict=True))
    assert [missing for missing, is_seen in found.items() if not is_seen] == []
