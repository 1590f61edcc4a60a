"""Lookout: finds out that ranks parted, where each waits for a message that will never come.

On gloo every message carries its name (Note [A message carries its name] in collectives.py), so
ranks that took different paths wait for each other until the timeout. Long before that they can
know: collectives of a model are numbered, and whoever has used number 15 for a gather of blocks.2
will never answer a gather of blocks.1 (#15). So a thread on each rank looks on, about twice a
second, and does nothing unless a wait has lasted since its last look. Then it leaves a note of what
this rank has issued in torch's store, and reads those of the ranks waited for.

Only what cannot change any more is an alarm. A rank that is slow, or that waits elsewhere, has not
used the number yet, and is waited for until the timeout.

Note [Waits are broken by breaking the connection]
    torch has no call that ends a wait on gloo. A receive that times out closes all connections of
    its group, so the thread posts one that times out at once. They are unusable after a failure in
    any case.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import deque
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from layerzero.comm.onlooker import look_on
from layerzero.comm.run_names import own_connection
from layerzero.core.groups import ShardGroup

PAUSE_S = 0.5
_HISTORY = 1024
"""Collectives a rank remembers: about how far ranks may drift apart and still be compared."""
_TAG = 0x3FFFFFFF
"""Below all tags of the engine's messages."""

_logger = logging.getLogger(__name__)


class Waiting(Protocol):
    """A collective that a thread waits for."""

    group: ShardGroup
    nbytes: int
    """Of each message."""
    peer: int
    """Rank in the group whose message is waited for now; -1: all."""
    num_looks: int
    """How often the lookout has met it, from 0."""

    @property
    def number(self) -> int:
        """Of the operation."""

    @property
    def name(self) -> str:
        """Of the operation; the same on every rank."""


class Lookout:
    """Watches the waits of one model on gloo."""

    issued: deque[tuple[int, str, str]]
    """Number, verb and unit of each collective, in order; those of all groups."""
    waiting: set[Waiting]
    """What threads of this rank wait for."""
    verdict: str | None
    """Once ranks parted: which, and where; nothing is waited for any more."""

    def __init__(self, places: Mapping[dist.ProcessGroup, str]) -> None:
        """`places`: under which name this model is known on each of its groups."""
        self.issued = deque(maxlen=_HISTORY)
        self.waiting = set()
        self.verdict = None
        self._places = dict(places)
        self._store: dist.Store | None = None
        self._published: tuple[Any, ...] = ()
        self._thread: threading.Thread | None = None

    def begin_wait(self, collective: Waiting) -> None:
        """A thread is about to wait. Cheap: all else is the looking thread's work."""
        self.waiting.add(collective)
        if self._thread is None:
            self._thread = look_on(self, _look, PAUSE_S, "layerzero-lookout")

    def look(self) -> None:
        """What the thread does between pauses."""
        if self.verdict is None:
            long = []
            for collective in self.waiting.copy():
                collective.num_looks += 1
                if collective.num_looks > 1:
                    long.append(collective)
            if not long:
                return
            self._find_out(long)
        if self.verdict is not None:
            for collective in self.waiting.copy():
                _break(collective)

    def ask(self) -> str | None:
        """The verdict, also one that this rank has not heard of. For a rank whose wait failed."""
        if self.verdict is None:
            try:
                store = self._open()
                self._read_verdict(store)
            except (RuntimeError, ValueError) as error:
                _logger.debug("the store does not answer: %s", error)
        return self.verdict

    def _open(self) -> dist.Store:
        if self._store is None:
            self._store = dist.PrefixStore("layerzero/lookout", own_connection())
        return self._store

    def _find_out(self, long: list[Waiting]) -> None:
        try:
            store = self._open()
            self._read_verdict(store)
            if self.verdict is None:
                self._publish(store, long)
                for collective in long:
                    self._compare(store, collective)
        except (RuntimeError, ValueError) as error:
            # The store is gone, with the rank that keeps it.
            _logger.debug("waits are not compared between ranks: %s", error)

    def _publish(self, store: dist.Store, long: list[Waiting]) -> None:
        issued = tuple(self.issued)
        waits = {str(collective.number): _sized(collective) for collective in long}
        news = issued[-1:], tuple(waits)
        if news == self._published:
            return
        rank = dist.get_rank()
        note = json.dumps(
            {"issued": {n: f"{verb} of {unit}" for n, verb, unit in issued}, "waits": waits}
        )
        for place in self._places.values():
            store.set(f"{place}/{rank}", note)
        self._published = news

    def _compare(self, store: dist.Store, collective: Waiting) -> None:
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
                store.compare_set(f"{place}/parted", "", found)
                self._read_verdict(store)
                return

    def _difference(self, collective: Waiting, rank: int, note: dict[str, Any]) -> str | None:
        """Why `collective` will never get its message from `rank`; None if it still may."""
        number = str(collective.number)
        own = {str(n): f"{verb} of {unit}" for n, verb, unit in tuple(self.issued)}
        theirs: dict[str, str] = note["issued"]
        here = dist.get_rank()
        if number in own and number in theirs and own[number] != theirs[number]:
            # They may have parted before: in operations that they have with others.
            first = next(n for n in own if n in theirs and own[n] != theirs[n])
            (one, went), (other, other_went) = sorted([(here, own[first]), (rank, theirs[first])])
            return (
                f"rank {one} and rank {other} parted at operation #{first} of this model: "
                f"rank {one} went on to {went}, rank {other} to {other_went}"
            )
        waits = note["waits"].get(number)
        if waits is not None and waits != _sized(collective):
            return (
                f"rank {here} and rank {rank} have different models: rank {here} waits in "
                f"{_sized(collective)}, rank {rank} in {waits}"
            )
        return None

    def _read_verdict(self, store: dist.Store) -> None:
        """Take the verdict of any group, and hand it on to all the model's."""
        keys = [f"{place}/parted" for place in self._places.values()]
        for key in keys:
            if store.check([key]):
                verdict = store.get(key).decode()
                for other in keys:
                    store.compare_set(other, "", verdict)
                self.verdict = verdict
                return


def _look(lookout: Lookout) -> bool:
    lookout.look()
    return True


def _sized(collective: Waiting) -> str:
    return f"{collective.name} with {collective.nbytes} bytes a rank"


def _break(collective: Waiting) -> None:
    """See Note [Waits are broken by breaking the connection]."""
    group = collective.group
    peer = collective.peer if collective.peer >= 0 else (group.rank + 1) % group.size
    try:
        work = group.process_group.recv([torch.empty(1)], peer, _TAG)
        work.wait(timedelta(milliseconds=1))
    except RuntimeError as error:
        _logger.debug("%s is given up: %s", collective.name, error)
