"""The engine's host work for a unit and step is what benchmarks/results/host_work_*.md says; in
steady state a step makes no events, and the threads of gloo's sockets take no core from a thread
that computes (comm/gloo/threads.py)."""

import functools
import gc
import json
import os
import platform
import re
import subprocess
import sys
from collections import deque
from typing import Any
from unittest import mock

import pytest
import torch
from torch.torch_version import TorchVersion

import layerzero
from layerzero import ZeRO3
from tests.harness.fake_ranks import as_fake_ranks, run_fake_ranks
from tests.harness.internals import EventPool, PooledEvent, watchdog
from tests.harness.internals import threads as loop_threads
from tests.harness.models import Mlp
from tests.harness.pages import REPOSITORY
from tests.harness.ranks import on_ranks
from tests.harness.recording import observed
from tests.harness.simulated_device import Stream, simulated_device
from tests.harness.stream_uses import LAYERED, SETTINGS, accumulation, train, wrapped

BENCHMARK = REPOSITORY / "benchmarks" / "bench_host_work.py"


def _committed() -> dict[str, Any]:
    [page] = (REPOSITORY / "benchmarks" / "results").glob("host_work_*.md")
    [line] = re.findall(r'^\{"benchmark": "host_work".*\}$', page.read_text(), re.M)
    return json.loads(line)


@pytest.mark.skipif(
    not layerzero.native_status().native, reason="plain torch instead of kernels does more work"
)
@pytest.mark.parametrize("ranks", ["64", pytest.param("4096", marks=pytest.mark.soak)])
def test_host_work_of_a_unit_is_not_more_than_committed(ranks: str) -> None:
    committed = _committed()
    # A new interpreter: what other tests have imported adds frames of torch.
    command = [sys.executable, str(BENCHMARK), "--engines", "layerzero", "--measure", "8", ranks]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    run = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert run.returncode == 0, run.stderr
    at_8, at_many = (json.loads(line)["layerzero"] for line in run.stdout.splitlines()[-2:])
    assert at_8 == at_many, "the engine's work, construction's too, must not grow with the world"

    expected = committed["world_sizes"]["8"]["layerzero"]
    environment = committed["environment"]
    # What torch's own functions do is for one version of torch and of Python alone.
    of_torch = {"frames", "operations", "allocations", "construction_frames"}
    versions = (environment["torch"], environment["python"].rpartition(".")[0])
    if versions == (torch.__version__, platform.python_version().rpartition(".")[0]):
        of_torch = {"construction_frames"}
    assert "event_records" in expected
    for kind in expected.keys() - of_torch:
        assert at_8[kind] <= expected[kind], kind


def plain(model: ZeRO3) -> None:
    train(model, 1)


def _made_and_recorded(settings: dict, use) -> tuple[int, int]:
    """Events made and recorded by two steps, after three others."""
    counts = {"made": 0, "recorded": 0}

    def count(pool: EventPool, stream: Stream) -> None:
        counts["recorded"] += 1
        counts["made"] += not pool._free

    # The watchdog lets go of events about once a second, when its thread looks.
    none = functools.partial(deque, maxlen=0)
    with mock.patch.object(watchdog, "deque", none), simulated_device():
        model = wrapped(**settings)
        for _ in range(3):
            use(model)
        gc.disable()
        try:
            with observed(EventPool, "record", count):
                use(model)
                use(model)
        finally:
            gc.enable()
    return counts["made"], counts["recorded"]


def _of_each(settings: list[dict], use) -> list[tuple[int, int]]:
    return [_made_and_recorded(each, use) for each in settings]


def test_a_step_makes_no_events() -> None:
    one = [SETTINGS[name] for name in ("default", "bfloat16", "deterministic")]
    layers = [LAYERED[name] for name in ("zero1", "replicate, bfloat16", "sums in shards")]
    found = run_fake_ranks((1,), 2, _of_each, one, plain)
    found += run_fake_ranks((3,), 4, _of_each, layers, accumulation)
    for made, recorded in (counts for each in found for counts in each):
        assert recorded > 30
        assert made == 0


def with_an_event_that_is_still_waited_for() -> object:
    """The pool gives out an event whose last record somebody has yet to wait for."""
    events: dict[int, object] = {}

    def record(pool: EventPool, stream: Stream) -> PooledEvent:
        event = events[id(pool)] = stream.record_event(events.get(id(pool)))
        return PooledEvent(event, deque())

    return mock.patch.object(EventPool, "record", record)


@as_fake_ranks((0, 1), 2)
def test_an_event_recorded_again_too_early_is_found() -> None:
    with with_an_event_that_is_still_waited_for(), simulated_device() as device:
        plain(wrapped())
    assert device.races


pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="scheduling classes of threads are Linux's"
)


def _classes() -> set[int]:
    threads = loop_threads._loop_threads()
    assert threads, "gloo's threads have another name"
    return {os.sched_getscheduler(thread) for thread in threads}


@pytest.mark.skipif(TorchVersion(torch.__version__) < "2.12", reason="gloo gives them no name")
@on_ranks(2, fresh=True)
def test_wrapping_lets_them_wait_for_a_core() -> None:
    # The harness has chosen a class for all threads of a rank.
    for thread in (0, *loop_threads._loop_threads()):
        os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
    ZeRO3(Mlp())
    assert _classes() == {os.SCHED_BATCH}
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
    for thread in loop_threads._loop_threads():
        os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
    ZeRO3(Mlp())
    assert _classes() == {os.SCHED_IDLE}, "a class that somebody chose is kept"


def test_a_system_that_forbids_it_is_left_alone() -> None:
    with (
        mock.patch.object(loop_threads, "_loop_threads", return_value=[os.getpid()]),
        mock.patch.object(os, "sched_getscheduler", return_value=os.SCHED_OTHER),
        mock.patch.object(os, "sched_setscheduler", side_effect=PermissionError) as call,
    ):
        loop_threads.wake_without_preempting()
    assert call.called
