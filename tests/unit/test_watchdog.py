"""What the watchdog makes of a device's events, and its thread: its device, captures of other
threads, errors of a check. The ranks are in tests/distributed."""

from __future__ import annotations

import functools
import gc
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.harness.internals import (
    CollectiveError,
    EventPool,
    Operation,
    Pending,
    ShardGroup,
    Watchdog,
    events,
    run_periodically,
    watchdog,
)

CPU = torch.device("cpu")
TIMEOUT = timedelta(milliseconds=20)


def nccl_group(timeout: timedelta) -> ShardGroup:
    return ShardGroup(None, 0, (0, 1), "nccl", timeout)


class Event:
    def __init__(self) -> None:
        self.happened = False

    def query(self) -> bool:
        return self.happened


class Dog(Watchdog):
    """Keeps what it would tell; each mark is an `Event`."""

    def __init__(self, group: ShardGroup) -> None:
        self.failure: CollectiveError | None = None
        self.group = group
        super().__init__(group, CPU, Event, lambda: (Event(),), self.remember, None)

    def remember(self, error: CollectiveError) -> None:
        self.failure = error


def gather(dog: Dog, unit: str) -> Pending:
    """A gather the host is past and the device is not."""
    pending = Pending(Operation("all-gather", unit, 1, dog), dog.group, 8)
    dog.issued.append(pending)
    work = SimpleNamespace(wait=lambda: None, is_completed=lambda: False)
    pending.works = ((work, -1),)
    pending.wait()
    return pending


@pytest.fixture
def dog(monkeypatch: pytest.MonkeyPatch) -> Dog:
    """A watchdog of a device with streams, without its thread."""
    monkeypatch.setattr(watchdog, "run_periodically", lambda *_: None)
    monkeypatch.setattr(watchdog, "_abort", lambda *_: None)
    monkeypatch.setattr(
        watchdog, "diagnose", lambda name, *_: CollectiveError(f"{name} stands still")
    )
    return Dog(nccl_group(TIMEOUT))


def look_for_longer_than_the_timeout(dog: Dog) -> None:
    dog.check()
    time.sleep(2 * TIMEOUT.total_seconds())
    dog.check()


def test_time_does_not_run_before_the_device_has_come_to_the_collective(dog: Dog) -> None:
    pending = gather(dog, "a")
    look_for_longer_than_the_timeout(dog)
    assert dog.failure is None
    pending._events_before[0].happened = True
    look_for_longer_than_the_timeout(dog)
    assert "all-gather of a (#1) stands still" in str(dog.failure)


def test_each_collective_has_the_whole_timeout_once_the_one_before_is_done(dog: Dog) -> None:
    both = [gather(dog, unit) for unit in "ab"]
    for pending in both:
        pending._events_before[0].happened = True
    dog.check()
    time.sleep(2 * TIMEOUT.total_seconds())
    both[0]._done_event.happened = True
    dog.check()
    assert dog.failure is None
    time.sleep(2 * TIMEOUT.total_seconds())
    dog.check()
    assert "all-gather of b (#1) stands still" in str(dog.failure)


def test_history_is_bounded(dog: Dog) -> None:
    for number in range(watchdog._HISTORY + 10):
        gather(dog, f"layers.{number}")
    dog.check()
    assert len(dog._history) == watchdog._HISTORY


DEVICE = torch.device("cuda", 3)
PAUSE_S = 0.002
LIMIT_S = 10.0


def wait_until(happened: Callable[..., bool], *args: object) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not happened(*args):
        assert time.monotonic() < deadline
        time.sleep(PAUSE_S)


class Module:
    """A device module: each thread begins on device 0."""

    def __init__(self) -> None:
        self._devices: dict[int, int] = {}

    def set_device(self, index: int) -> None:
        """Of modules from outside torch some take no `torch.device`, as OpenReg's."""
        assert isinstance(index, int)
        self._devices[threading.get_ident()] = index

    def current_device(self) -> int:
        return self._devices.get(threading.get_ident(), 0)


class QueriedEvent:
    """Keeps on which device it was queried, and which thread destroyed it."""

    queried_on: list[int]
    destroyed_by: list[str]

    def __init__(self, module: Module) -> None:
        self._module = module

    def record(self, stream: Stream) -> None: ...

    def query(self) -> bool:
        QueriedEvent.queried_on.append(self._module.current_device())
        return True

    def __del__(self) -> None:
        QueriedEvent.destroyed_by.append(threading.current_thread().name)


class Stream:
    def __init__(self, module: Module) -> None:
        self._module = module
        self.num_made = 0

    def record_event(self) -> QueriedEvent:
        self.num_made += 1
        return QueriedEvent(self._module)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Module]:
    module = Module()
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    monkeypatch.setattr(watchdog, "_LONGEST_PAUSE_S", PAUSE_S)
    QueriedEvent.queried_on, QueriedEvent.destroyed_by = [], []
    return module


def test_the_thread_queries_on_the_models_device_and_destroys_no_event(
    module: Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver({})
    monkeypatch.setattr(events, "_driver", lambda: driver)
    stream, pool = Stream(module), EventPool()
    record, group = functools.partial(pool.record, stream), nccl_group(timedelta(seconds=60))
    dog = Watchdog(group, DEVICE, record, lambda record=record: (record(),), print, None)
    for _ in range(20):
        pending = Pending(Operation("all-gather", "a", 1, dog), group, 8)
        dog.issued.append(pending)
        pending.start(lambda: None)
        pending.wait()
        wait_until(lambda dog: not dog.issued and not dog._in_flight, dog)
    assert set(QueriedEvent.queried_on) == {3}
    assert set(driver.modes) == {(1, "layerzero-watchdog")}, "it leaves captures of others alone"
    # The last reference may be gone a moment after the watchdog's list is empty.
    assert stream.num_made <= 4
    thread = dog._thread
    assert thread is not None
    del dog, pending
    gc.collect()
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    assert QueriedEvent.destroyed_by == []
    del pool, record
    gc.collect()
    assert set(QueriedEvent.destroyed_by) == {"MainThread"}


def test_a_pool_without_capacity_records_no_event_again(module: Module) -> None:
    stream = Stream(module)
    pool = EventPool(capacity=0)
    for _ in range(5):
        pool.record(stream)
    assert stream.num_made == 5


class Owner:
    checks = 0


def test_an_error_of_a_check_is_logged_once_and_does_not_end_the_thread(
    caplog: pytest.LogCaptureFixture,
) -> None:
    owner = Owner()

    def check(owner: Owner) -> bool:
        owner.checks += 1
        if owner.checks < 3:
            raise RuntimeError("operation not permitted when stream is capturing")
        return True

    with caplog.at_level(logging.ERROR, logger="layerzero"):
        thread = run_periodically(owner, check, PAUSE_S, "layerzero-watchdog")
        wait_until(lambda owner: owner.checks > 4, owner)
    (record,) = caplog.records
    assert record.getMessage() == (
        "layerzero-watchdog could not check, and goes on: RuntimeError: operation not permitted "
        "when stream is capturing"
    )
    del owner
    thread.join(LIMIT_S)
    assert not thread.is_alive()


class Driver:
    """libcuda, as far as it is called."""

    def __init__(self, answers: dict[int, int]) -> None:
        self.modes: list[tuple[int, str]] = []
        self._answers = answers

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        self.modes.append((mode._obj.value, threading.current_thread().name))
        return 0

    def cuEventQuery(self, event: int) -> int:
        return self._answers[event]


def test_cuda_events_are_queried_by_the_driver(monkeypatch) -> None:
    driver = Driver({1: 0, 2: 600, 3: 700})
    monkeypatch.setattr(events, "_driver", lambda: driver)

    def is_done(number: int) -> bool:
        """torch's own `query` tells the error that the driver numbers."""
        query = mock.Mock(side_effect=RuntimeError("an illegal memory access was encountered"))
        return events.is_done(SimpleNamespace(cuda_event=number, query=query))

    assert is_done(1) and not is_done(2)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        is_done(3)


_EXITS = """
import threading, time
from datetime import timedelta
import torch.distributed as dist
from layerzero.watch.thread import run_periodically

class Owner:
    pass

class Slow:
    "Of use while Python is torn down: the thread comes back from C++ meanwhile."
    def __del__(self, sleep=time.sleep):
        sleep(1.0)

store, checks, owner = dist.HashStore(), threading.Event(), Owner()
store.set_timeout(timedelta(seconds=0.5))

def check(_):
    checks.set()
    store.get("a key that nobody sets")
    return True

run_periodically(owner, check, 0.01, "checks")
checks.wait()
slow = Slow()
"""


def test_a_process_may_exit_while_a_thread_checks() -> None:
    done = subprocess.run([sys.executable, "-c", _EXITS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
