"""Warns of a wait that has lasted half of its limit, before it becomes an error.

A slow rank is not a dead one: it may save, evaluate or wait for data. The warning names the
operation and the rank waited for, while there is still time to raise the limit of the next run.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

from layerzero.flat.placement import ShardGroup
from layerzero.watch.thread import run_periodically

LONGEST_PAUSE_S = 0.5
_IDLE_CHECKS = 4
"""Checks without any wait after which the thread of `OtherWaits` ends."""

_logger = logging.getLogger(__name__)


def pause_for(limit: timedelta) -> float:
    """Seconds between two checks of waits of this limit."""
    return min(LONGEST_PAUSE_S, limit.total_seconds() / 8)


class Waiting(Protocol):
    """A collective that a thread waits for."""

    group: ShardGroup
    nbytes: int
    """Size of each message."""
    peer: int
    """Group rank of the peer whose message is awaited now; -1: all."""
    num_checks: int
    """Number of checks that found it waiting; starts at 0."""

    @property
    def number(self) -> int:
        """Number of the operation within the model."""

    @property
    def name(self) -> str:
        """Name of the operation; the same on every rank."""

    def wait(self) -> object: ...


class WatchesWaits(Protocol):
    """Object at which threads register their waits: a `DesyncDetector`, or `other_waits`."""

    waiting: set[Waiting]

    def begin_wait(self, collective: Waiting) -> None: ...


def warn_half_time(name: str, group: ShardGroup, waits_for: str, seconds: float) -> None:
    """Log the warning that this rank has waited `seconds`, half of the limit or more."""
    rank, limit = group.ranks[group.rank], group.limit.total_seconds()
    _logger.warning(
        "%s: rank %d has waited %.3g s for %s; after %g s this is an error. If a rank is busy "
        "alone (a save, an evaluation, data, compilation), raise the limit on every rank: "
        "init_process_group(timeout=...), ZeRO3(timeout=...), or, around that phase, "
        "`with model.timeout(minutes=...):`",
        *(name, rank, seconds, waits_for, limit),
    )


def is_half_time(seconds: float, limit: timedelta) -> bool:
    return seconds >= limit.total_seconds() / 2


class _Seen(NamedTuple):
    peer: int
    since: float
    """Time of the first check that found it waiting for this peer."""
    was_warned_of: bool


class SlowWaits:
    """Warns once of each wait, for one peer, that is past half of its limit."""

    def __init__(self) -> None:
        # Weak: a collective holds its buffers.
        self._seen: WeakKeyDictionary[Waiting, _Seen] = WeakKeyDictionary()

    def check(self, waiting: Iterable[Waiting]) -> None:
        """Check the waits under way; called periodically on one thread."""
        now = time.monotonic()
        for collective in waiting:
            peer, group = collective.peer, collective.group
            seen = self._seen.get(collective)
            if seen is None or seen.peer != peer:
                seen = _Seen(peer, now, False)
            elif not seen.was_warned_of and is_half_time(now - seen.since, group.limit):
                seen = seen._replace(was_warned_of=True)
                waits_for = "the group" if peer < 0 else f"rank {group.ranks[peer]}"
                warn_half_time(collective.name, group, waits_for, now - seen.since)
            self._seen[collective] = seen


class OtherWaits:
    """Waits of this process outside any model's detector: construction, checkpoints, meshes.

    Its thread starts with a wait, and ends when there was none for a while.
    """

    waiting: set[Waiting]

    def __init__(self) -> None:
        self.waiting = set()
        self._slow = SlowWaits()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._num_idle = 0

    def begin_wait(self, collective: Waiting) -> None:
        """Register a wait that is about to begin; its end discards it from `waiting`."""
        self.waiting.add(collective)
        with self._lock:
            if self._thread is None or not self._thread.is_alive():  # Dead in a forked process.
                self._num_idle = 0
                pause_s = pause_for(collective.group.limit)
                self._thread = run_periodically(self, _check, pause_s, "layerzero-waits")

    def check(self) -> bool:
        """Check the waits once; False if the thread is to end."""
        waiting = self.waiting.copy()
        self._slow.check(waiting)
        self._num_idle = 0 if waiting else self._num_idle + 1
        with self._lock:
            if self._num_idle < _IDLE_CHECKS or self.waiting:
                return True
            self._thread = None
            return False


def _check(waits: OtherWaits) -> bool:
    return waits.check()


other_waits = OtherWaits()
"""One for the process: these waits belong to no model, or to several."""
