"""What the watchdog makes of a device's events; the ranks are in tests/distributed."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch

from layerzero.comm.pending import Operation, Pending
from layerzero.flat.placement import ShardGroup
from layerzero.watch import watchdog
from layerzero.watch.diagnosis import CollectiveError
from layerzero.watch.watchdog import Watchdog

CPU = torch.device("cpu")
TIMEOUT = timedelta(milliseconds=20)


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


class Work:
    def wait(self) -> None: ...

    def is_completed(self) -> bool:
        return False


def gather(dog: Dog, unit: str) -> Pending:
    """A gather the host is past and the device is not."""
    pending = Pending(Operation("all-gather", unit, 1, dog), dog.group, 8)
    dog.issued.append(pending)
    pending.works = ((Work(), -1),)
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
    group = ShardGroup(None, 0, (0, 1), "nccl", TIMEOUT)
    return Dog(group)


def look_for_longer_than_the_timeout(dog: Dog) -> None:
    dog.check()
    time.sleep(2 * TIMEOUT.total_seconds())
    dog.check()


def test_a_collective_the_device_has_passed_is_forgotten(dog: Dog) -> None:
    pending = gather(dog, "a")
    pending._events_before[0].happened = True
    pending._done_event.happened = True
    look_for_longer_than_the_timeout(dog)
    assert dog.failure is None
    assert not dog._in_flight


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
