"""Warns of a wait that has lasted half of its limit, before it becomes an error.

A slow rank is not a dead one: it may save, evaluate or wait for data. The warning names the
operation and the rank waited for, while there is still time to raise the limit of the next run.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from datetime import timedelta
from typing import Protocol
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


class Collective(Protocol):
    """A collective in flight: issued, and not yet completed by the device (on CPU, the host)."""

    group: ShardGroup
    nbytes: int
    """Size of the whole tensor; of each message, where messages carry names."""
    peer: int
    """Group rank of the peer whose message is awaited now; -1: all."""
    number: int
    """Number of the operation within the model."""

    @property
    def name(self) -> str:
        """Name of the operation; the same on every rank."""

    @property
    def is_reached(self) -> bool:
        """Whether this rank's stream has reached the collective, and waits only for peers."""

    @property
    def is_done(self) -> bool: ...

    def wait(self) -> object: ...


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


class Waits:
    """Waits of this process's threads. Warns once of each, for one peer, past half of its limit."""

    waiting: set[Collective]
    """Collectives that threads of this rank wait for now; the end of a wait discards its own."""

    def __init__(self) -> None:
        self.waiting = set()
        # Weak: a collective holds its buffers.
        self._seen: WeakKeyDictionary[Collective, tuple[int, float]] = WeakKeyDictionary()
        """The peer that a collective waits for, and the time of the first check that found it so;
        infinity once it was warned of."""

    def begin_wait(self, collective: Collective) -> None:
        """Register a wait that is about to begin. Cheap: a thread does the rest."""
        raise NotImplementedError

    def _check_slow(self) -> tuple[set[Collective], list[Collective]]:
        """Warn of slow waits; return those under way, and those that the last check found too."""
        waiting, now = self.waiting.copy(), time.monotonic()
        again = [collective for collective in waiting if collective in self._seen]
        for collective in waiting:
            peer, group = collective.peer, collective.group
            before, since = self._seen.get(collective, (peer, now))
            if before != peer:
                since = now
            elif is_half_time(now - since, group.limit):
                waits_for = "the group" if peer < 0 else f"rank {group.ranks[peer]}"
                warn_half_time(collective.name, group, waits_for, now - since)
                since = math.inf
            self._seen[collective] = peer, since
        return waiting, again


class OtherWaits(Waits):
    """Waits of this process outside any model's detector: construction, checkpoints, meshes.

    Its thread starts with a wait, and ends when there was none for a while.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._num_idle = 0

    def begin_wait(self, collective: Collective) -> None:
        self.waiting.add(collective)
        with self._lock:
            if self._thread is None or not self._thread.is_alive():  # Dead in a forked process.
                self._num_idle = 0
                pause_s, check = pause_for(collective.group.limit), OtherWaits.check
                self._thread = run_periodically(self, check, pause_s, "layerzero-waits")

    def check(self) -> bool:
        """Check the waits once; False if the thread is to end."""
        waiting, _ = self._check_slow()
        self._num_idle = 0 if waiting else self._num_idle + 1
        with self._lock:
            if self._num_idle < _IDLE_CHECKS or self.waiting:
                return True
            self._thread = None
            return False


other_waits = OtherWaits()
"""One for the process: these waits belong to no model, or to several."""
