"""Watchdog: detects hangs and mismatched collectives on backends whose messages carry no name.

A thread on each rank checks two things about once a second (decision 0014): whether the oldest
collective in flight has made no progress for longer than the timeout, upon which the group is
aborted, which unblocks a host that waits for the device; and whether the ranks have issued the same
collectives, by digests that neighbours in a ring compare.

The error is logged at once, and raised by the next use of the model.
"""

from __future__ import annotations

import json
import logging
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from layerzero.errors import CollectiveError
from layerzero.flat.placement import ShardGroup
from layerzero.notices import some_ranks
from layerzero.watch.diagnosis import (
    REPORT_SECONDS,
    Collective,
    diagnose,
    open_notes,
    warns_at_half_time,
)
from layerzero.watch.events import Event, PooledEvent, ignore_captures_of_other_threads
from layerzero.watch.thread import run_periodically

_HISTORY = 4096
"""Collectives a rank remembers; ranks further apart than this cannot be compared."""
_LONGEST_PAUSE_S = 1.0

_logger = logging.getLogger(__name__)


class Watchdog:
    """Watches the collectives that one model issues on one process group."""

    issued: deque[Collective]
    """Collectives that are about to be issued are appended here; the thread takes them out."""

    def __init__(
        self,
        group: ShardGroup,
        device: torch.device,
        record_event: Callable[[], Event],
        events_before: Callable[[], Sequence[PooledEvent]],
        on_failure: Callable[[CollectiveError], None],
        place: str | None,
    ) -> None:
        """
        Args:
            place: prefix of this model's notes in the store, the same on every rank; None: it has
                none, and ranks are not compared.
            record_event, events_before: of `Streams`.
            on_failure: called on the watchdog's thread; must not keep the model alive.
        """
        self.record_event = record_event
        self.events_before = events_before
        self._group = group
        self._device = device
        self._on_failure = on_failure
        self.issued = deque()
        self._in_flight: deque[Collective] = deque()
        self._standing_since: float | None = None
        self._was_warned_of = False
        self._history: dict[int, tuple[int, str]] = {}
        self._count = 0
        self._digest = 0
        self._store = None if place is None else open_notes(f"watchdog/{place}")
        pause_s = min(_LONGEST_PAUSE_S, group.limit.total_seconds() / 4)
        self._thread = run_periodically(self, _check_on_device, pause_s, "layerzero-watchdog")

    def check(self) -> bool:
        """Check the collectives in flight once; called by the thread until it returns False."""
        has_news = bool(self.issued)
        self._take_issued()
        while self._in_flight and self._in_flight[0].is_done:
            self._in_flight.popleft()
            self._standing_since = None
        error = None
        if has_news or self._in_flight:
            error = self._compare_with_next_rank() or self._find_standstill()
        if error is not None:
            self._on_failure(error)
            _logger.error("%s", error)
            _abort(self._group, self._device)
        return error is None

    def _take_issued(self) -> None:
        """Add collectives issued since the last check to the history."""
        while self.issued:
            collective = self.issued.popleft()
            self._count += 1
            name = collective.name
            self._digest = zlib.crc32(f"{name}/{collective.nbytes}".encode(), self._digest)
            self._history[self._count] = self._digest, name
            self._history.pop(self._count - _HISTORY, None)
            self._in_flight.append(collective)

    def _find_standstill(self) -> CollectiveError | None:
        # Collectives of a group run in order, so the oldest one holds up all others.
        if not self._in_flight or not self._in_flight[0].is_reached:
            return None
        if self._standing_since is None:
            self._standing_since, self._was_warned_of = time.monotonic(), False
        seconds, limit = time.monotonic() - self._standing_since, self._group.limit
        name = self._in_flight[0].name
        if seconds >= limit.total_seconds():
            return diagnose(name, self._group, -1, TimeoutError("timed out"))
        if seconds >= limit.total_seconds() / 2 and not self._was_warned_of:
            awaited = self._find_awaited()
            self._was_warned_of = warns_at_half_time(name, self._group, awaited, seconds)
        return None

    def _find_awaited(self) -> str:
        """The ranks that have not issued the oldest collective in flight, by the store."""
        store, ranks = self._store, []
        try:
            if store is not None:
                number = self._count - len(self._in_flight) + 1
                ranks = [rank for rank in self._group.ranks if _published(store, rank)[0] < number]
        except (RuntimeError, ValueError) as error:
            _logger.debug("cannot find the rank that is awaited: %s", error)
        return some_ranks(ranks) if ranks else "the group"

    def _compare_with_next_rank(self) -> CollectiveError | None:
        """Publish what this rank has issued, and compare it with the next rank. The error is about
        the pair that some rank found to differ."""
        store, group = self._store, self._group
        if store is None or not self._count:
            return None
        rank, next_rank = group.ranks[group.rank], group.ranks[(group.rank + 1) % group.size]
        try:
            store.set(f"digest/{rank}", json.dumps([self._count, self._digest]))
            at, theirs = _published(store, next_rank)
            if self._history.get(at, (theirs, ""))[0] != theirs:
                # Only the first pair is stored, so that every rank reports the same one.
                store.compare_set("diverged", "", json.dumps([rank, next_rank]))
            if store.check(["diverged"]):
                return self._divergence(store, json.loads(store.get("diverged")))
        except (RuntimeError, ValueError) as error:
            # The store is gone, with the rank that serves it, or is a fake (torch's fake group).
            _logger.debug("stopped comparing collectives between ranks: %s", error)
            self._store = None
        return None

    def _divergence(self, store: dist.Store, pair: list[int]) -> CollectiveError:
        """Blocks up to `REPORT_SECONDS`, until both ranks have published what they issued."""
        rank = self._group.ranks[self._group.rank]
        if rank in pair:
            own = {count: name for count, (_, name) in self._history.items()}
            store.set(f"history/{rank}", json.dumps(own))
        keys = [f"history/{each}" for each in pair]
        deadline = time.monotonic() + REPORT_SECONDS
        while not store.check(keys) and time.monotonic() < deadline:
            time.sleep(0.05)
        notes = [store.get(key) if store.check([key]) else "{}" for key in keys]
        first, second = map(json.loads, notes)
        text = (
            f"rank {pair[0]} and rank {pair[1]} issued different collectives, so their data may be "
            "mixed up: restart from the last checkpoint. Every rank must call the same units in "
            "the same order."
        )
        count = next((n for n in first if second.get(n, first[n]) != first[n]), None)
        if count is not None:
            text += (
                f"\nThe first difference is collective {count} of this model on this group:\n"
                f"  rank {pair[0]}: {first[count]}\n  rank {pair[1]}: {second[count]}"
            )
        return CollectiveError(text)


def _check_on_device(watchdog: Watchdog) -> bool:
    """`check`, on a thread on which queries of the device are harmless."""
    # A new thread is on device 0, where a query would make a context, of some 500 MB.
    torch.get_device_module(watchdog._device).set_device(watchdog._device.index)
    ignore_captures_of_other_threads()
    return watchdog.check()


def _abort(group: ShardGroup, device: torch.device) -> None:
    """Unblock threads that wait in a collective, if the backend can; else they time out."""
    try:
        group.process_group._get_backend(device).abort()
    except (RuntimeError, AttributeError) as error:
        _logger.debug("cannot abort the group: %s", error)


def _published(store: dist.Store, rank: int) -> tuple[int, int]:
    """Number of collectives that the rank had issued, and their digest; (0, 0) for none."""
    key = f"digest/{rank}"
    if not store.check([key]):
        return 0, 0
    count, digest = json.loads(store.get(key))
    return count, digest
