"""DesyncDetector: detects on gloo, before the timeout, that ranks took different paths.

A thread on each rank checks about twice a second, and does nothing unless a wait has lasted since
its previous check. What it then compares, why that is proof, and how it ends the waits: decision
0022.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Mapping
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from layerzero.watch.diagnosis import Collective, open_notes, warns_at_half_time
from layerzero.watch.thread import run_periodically

LONGEST_PAUSE_S = 0.5
_HISTORY = 1024
"""Collectives a rank remembers; ranks further apart than about this cannot be compared."""
_TAG = 0x3FFFFFFF
"""Tag of the receive in `_break`; below all tags of the engine's messages, so nothing matches."""

_logger = logging.getLogger(__name__)


class DesyncDetector:
    """Watches the waits of one model on gloo. Warns once of each, for one peer, past half of its
    limit."""

    waiting: set[Collective]
    """Collectives that threads of this rank wait for now; the end of a wait discards its own."""
    issued: deque[tuple[int, str, str]]
    """(number, verb, unit) of the latest collectives of the model, on all its groups, in order."""
    in_flight: set[Collective]
    """Messages posted and not yet waited for. A pass that fails waits for all of them, also for one
    that nothing referred to yet when it failed: gloo writes into their memory."""
    verdict: str | None
    """Which ranks took different paths, and at which operation; once set, all waits are broken."""

    def __init__(self, places: Mapping[dist.ProcessGroup, str]) -> None:
        """`places`: prefix of this model's notes in the store, for each group (`ModelNumber`)."""
        self.waiting, self.in_flight = set(), set()
        # Weak: a collective holds its buffers.
        self._seen: WeakKeyDictionary[Collective, tuple[int, float]] = WeakKeyDictionary()
        """The peer that a collective waits for, and the time of the first check that found it so;
        infinity once it was warned of."""
        self.issued = deque(maxlen=_HISTORY)
        self.verdict = None
        self._places = dict(places)
        self._store: dist.Store | None = None
        self._thread: threading.Thread | None = None

    def begin_wait(self, collective: Collective) -> None:
        """Register a wait that is about to begin. Cheap: a thread does the rest."""
        self.waiting.add(collective)
        if self._thread is None:
            pause_s = min(LONGEST_PAUSE_S, collective.group.limit.total_seconds() / 8)
            check = DesyncDetector.check
            self._thread = run_periodically(self, check, pause_s, "layerzero-desync")

    def check(self) -> bool:
        """Check the current waits once; called by the thread after each pause."""
        if self.verdict is None:
            long = [
                collective for collective in self.waiting.copy() if self._was_waiting(collective)
            ]
            if long:
                self._find_out(long)
        if self.verdict is not None:
            for collective in self.waiting.copy():
                _break(collective)
        return True

    def _was_waiting(self, collective: Collective) -> bool:
        """Whether the last check found it, too. Warns of it if it is slow."""
        peer, group, now = collective.peer, collective.group, time.monotonic()
        was_waiting = collective in self._seen
        before, since = self._seen.get(collective, (peer, now))
        waits_for = "the group" if peer < 0 else f"rank {group.ranks[peer]}"
        if before != peer:
            since = now
        elif warns_at_half_time(collective.name, group, waits_for, now - since):
            since = math.inf
        self._seen[collective] = peer, since
        return was_waiting

    def latest_verdict(self) -> str | None:
        """Return the verdict, read from the store if need be; called after a wait failed."""
        if self.verdict is None:
            self._find_out([])
        return self.verdict

    def _find_out(self, long: list[Collective]) -> None:
        """Read the verdict from the store; if there is none, look for one about these waits."""
        store = self._store = self._store or open_notes("desync")
        if store is None:
            return
        try:
            self._read_verdict(store)
            if self.verdict is None and long:
                waits = {str(collective.number): _sized(collective) for collective in long}
                note = json.dumps({"issued": self._names(), "waits": waits})
                for place in self._places.values():
                    store.set(f"{place}/{dist.get_rank()}", note)
                for collective in long:
                    self._compare(store, collective)
        except (RuntimeError, ValueError) as error:
            # The store is gone, with the rank that serves it.
            _logger.debug("cannot compare waits between ranks: %s", error)

    def _names(self) -> dict[str, str]:
        """The latest collectives by number, as the store has them."""
        return {str(n): f"{verb} of {unit}" for n, verb, unit in tuple(self.issued)}

    def _compare(self, store: dist.Store, collective: Collective) -> None:
        group = collective.group
        place = self._places.get(group.process_group)
        if place is None:
            return
        peers = [collective.peer] if collective.peer >= 0 else range(group.size)
        for peer in peers:
            rank = group.ranks[peer]
            key = f"{place}/{rank}"
            if rank == group.ranks[group.rank] or not store.check([key]):
                continue
            note = json.loads(store.get(key))
            found = self._difference(collective, rank, note)
            if found is not None:
                store.compare_set(f"{place}/verdict", "", found)
                self._read_verdict(store)
                return

    def _difference(self, collective: Collective, rank: int, note: dict[str, Any]) -> str | None:
        """Why `rank` will never send the message of `collective`; None if it still may."""
        number = str(collective.number)
        own, theirs = self._names(), note["issued"]
        here = dist.get_rank()
        if number in own and number in theirs and own[number] != theirs[number]:
            # This rank and `rank` may have diverged earlier, in operations with other ranks.
            first = next(n for n in own if n in theirs and own[n] != theirs[n])
            (one, went), (other, other_went) = sorted([(here, own[first]), (rank, theirs[first])])
            return (
                f"the ranks took different paths: at operation #{first} of this model rank {one} "
                f"issued {went}, rank {other} issued {other_went}"
            )
        waits = note["waits"].get(number)
        if waits is not None and waits != _sized(collective):
            return (
                f"the ranks' models or requires_grad differ: rank {here} waits in "
                f"{_sized(collective)}, rank {rank} in {waits}"
            )
        return None

    def _read_verdict(self, store: dist.Store) -> None:
        """Take the verdict that some rank published on one group; copy it to all the model's."""
        keys = [f"{place}/verdict" for place in self._places.values()]
        for key in keys:
            if store.check([key]):
                verdict = store.get(key).decode()
                for other in keys:
                    store.compare_set(other, "", verdict)
                self.verdict = verdict
                return


def _sized(collective: Collective) -> str:
    return f"{collective.name} with {collective.nbytes} bytes per rank"


def _break(collective: Collective) -> None:
    """A receive that times out closes all connections of its group (decision 0022)."""
    group = collective.group
    peer = collective.peer if collective.peer >= 0 else (group.rank + 1) % group.size
    try:
        work = group.process_group.recv([torch.empty(1, device="cpu")], peer, _TAG)
        work.wait(timedelta(milliseconds=1))
    except RuntimeError as error:
        _logger.debug("closed the connections that %s waits on: %s", collective.name, error)
