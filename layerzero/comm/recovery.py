"""Recovery: lets all ranks of a model go on after an exception on some of them, on gloo.

A rank that raises in the middle of a pass takes part in no further collective of it, and others
would wait for it until the timeout. Instead:

    this rank raises       notes in torch's store what it has posted, and what is in flight
    others, in a wait      for messages that it never posted, as its note says (the lookout's thread
                           reads it), raise as well (`PeerRaised`), and note the same
    every such rank        answers the messages of others that it never posted itself, with bytes
                           that nobody reads
    before the next use    all ranks wait for each other, and number operations alike again

Ranks that raise at the same place all raise their own errors: nobody waits for another.

So no message is left over, no connection breaks, and nothing is exchanged while no rank raises.
A wait on gloo cannot be ended from outside; that is why messages are answered.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from layerzero.comm.diagnosis import CollectiveError
from layerzero.comm.run_names import own_connection
from layerzero.comm.slow_waits import Waiting
from layerzero.core.groups import ShardGroup

_HISTORY = 4096
"""Operations that a rank remembers to have posted."""
_NOTED = 256
"""Of these, those that it notes: whatever another rank waits for is among them, or later."""
_PAUSE_S = 0.005


class PeerRaised(RuntimeError):
    """Another rank raised; this one ends its pass, too. All of them can go on."""


class Message(Protocol):
    """Messages of one collective with each other rank, posted and not yet waited for."""

    group: ShardGroup

    def wait(self) -> None: ...

    @property
    def number(self) -> int:
        """Number of the operation within the model."""

    @property
    def name(self) -> str:
        """Name of the operation; the same on every rank."""

    @property
    def is_posted(self) -> bool:
        """Stays so once it has been waited for, which another thread may do at any time."""

    @property
    def sizes(self) -> Sequence[Sequence[tuple[int, int, int, int]]]:
        """For each rank of the group, and each piece: tag and bytes of what this rank sends to it,
        and of what it receives from it; no message has 0 bytes."""


class Recovery:
    """What one rank knows of a failed pass of one model."""

    reason: str | None
    """Who raised what; until all ranks go on, no collective begins."""
    in_flight: set[Message]
    lock: threading.RLock
    """Held while messages are posted: what was posted is known exactly once `reason` is set."""

    def __init__(self, places: Mapping[dist.ProcessGroup, str], groups: Sequence[ShardGroup]):
        """
        Args:
            places: prefix of the model's notes in the store, for each group.
            groups: those groups, in an order that leads from every rank to every other.
        """
        self.reason = None
        self.in_flight = set()
        self.lock = threading.RLock()
        self._posted: deque[int] = deque(maxlen=_HISTORY)
        self._groups = [(places[group.process_group], group) for group in groups]
        self._epoch = 0
        self._store: dist.Store | None = None
        self._store_lock = threading.RLock()
        self._has_listed = False
        self._has_come: set[tuple[str, int]] = set()
        """Ranks, by place, whose list was answered."""
        self._answers: list[tuple[dist.Work, torch.Tensor]] = []

    # A pass fails -------------------------------------------------------------------------------

    def error(self, operation: str) -> PeerRaised:
        return PeerRaised(
            f"{operation}: {self.reason}; this rank ends its pass as well, which has changed no "
            "parameters, gradients or optimizer state: run it again on every rank"
        )

    def begin(self, message: Message) -> None:
        """Messages of a collective are about to be posted. Call it with `lock`.

        Raises:
            PeerRaised: the pass has failed on some rank.
        """
        if self.reason is not None:
            raise self.error(message.name)
        self.in_flight.add(message)
        self._posted.append(message.number)

    def stop(self, text: str) -> None:
        """This rank's pass has failed. Tells the others."""
        with self.lock:
            if self.reason is not None:
                return
            self.reason = f"rank {dist.get_rank()} raised {text}"
        self.answer()

    def look(self, waiting: Iterable[Waiting]) -> bool:
        """Find out whether another rank, which `waiting` waits for, will never post its messages;
        if so, or if this rank's pass has failed, answer those of others.

        Called by the lookout's thread, while waits last. Returns whether there is nothing to wait
        for.
        """
        with self._store_lock:
            if self.reason is None:
                text = next(filter(None, map(self._reason_of, waiting)), None)
                if text is None:
                    return False
                with self.lock:
                    self.reason = self.reason or text
            self.answer()
        return True

    def _reason_of(self, message: Waiting) -> str | None:
        """Why a peer will not post what a message waits for; None: it may, or it has."""
        store, group = self._open(), message.group
        place = next((p for p, g in self._groups if g.process_group is group.process_group), None)
        if place is None:
            return None
        for peer in [message.peer] if message.peer >= 0 else range(group.size):
            key = self._key(place, "stopped", str(group.ranks[peer]))
            if peer != group.rank and store.check([key]):
                note = json.loads(store.get(key))
                if message.number not in note["posted"]:
                    return str(note["reason"])
        return None

    def answer(self) -> None:
        """Note what this rank has posted, and answer messages of others that it never posted."""
        with self._store_lock:
            if self.reason is None:
                return
            store, own = self._open(), str(dist.get_rank())
            if not self._has_listed:
                with self.lock:
                    # An interrupt may have come between `begin` and the first message.
                    known = [*self.in_flight]
                    for message in [each for each in known if not each.is_posted]:
                        self.in_flight.discard(message)
                        self._posted.remove(message.number)
                    posted = [*self._posted][-_NOTED:]
                messages = [(each, each.sizes) for each in known if each.is_posted]
                for place, group in self._groups:
                    waits = {
                        message.number: dict(zip(group.ranks, sizes, strict=True))
                        for message, sizes in messages
                        if sizes and message.group.process_group is group.process_group
                    }
                    note = {"reason": self.reason, "posted": posted, "waits": waits}
                    store.set(self._key(place, "stopped", own), json.dumps(note))
                self._has_listed = True
            for place, group in self._groups:
                for index, rank in enumerate(group.ranks):
                    key = self._key(place, "stopped", str(rank))
                    if (place, rank) in self._has_come or str(rank) == own:
                        continue
                    if store.check([key]):
                        self._has_come.add((place, rank))
                        self._answer(json.loads(store.get(key))["waits"], own, group, index)

    def _answer(
        self, waits: dict[str, dict[str, list[list[int]]]], own: str, group: ShardGroup, peer: int
    ) -> None:
        process_group = group.process_group
        pieces = (
            piece
            for number, sizes in waits.items()
            if int(number) not in self._posted  # Else its messages are on their way.
            for piece in sizes[own]
        )
        for sent_tag, sent, received_tag, received in pieces:
            if received:
                tensor = torch.zeros(received, dtype=torch.uint8)
                work = process_group.send([tensor], peer, received_tag)
                self._answers.append((work, tensor))
            if sent:
                tensor = torch.empty(sent, dtype=torch.uint8)
                work = process_group.recv([tensor], peer, sent_tag)
                self._answers.append((work, tensor))

    # All ranks go on ----------------------------------------------------------------------------

    def go_on(self, own: Sequence[int]) -> list[list[int]]:
        """Wait until every rank has ended its pass. Collective over the model; blocks the host.

        Call it once nothing of the pass is in flight on this rank.

        Args:
            own: numbers of this rank.

        Returns:
            The numbers of all ranks, in no order, some perhaps several times.

        Raises:
            CollectiveError: a rank did not come within the timeout.
        """
        known = [list(own)]
        try:
            for place, group in self._groups:
                known = self._meet(place, group, known)
        except CollectiveError:
            raise
        except RuntimeError as error:
            raise CollectiveError(f"recovery after an exception failed: {error}") from error
        for work, _ in self._answers:
            work.wait(self._groups[0][1].limit)
        with self._store_lock, self.lock:
            self._forget_notes()
            self._epoch += 1
            self.reason = None
            self.in_flight.clear()
            self._posted.clear()
            self._has_listed = False
            self._has_come.clear()
            self._answers.clear()
        return known

    def _meet(self, place: str, group: ShardGroup, known: list[list[int]]) -> list[list[int]]:
        own = self._key(place, "ready", str(dist.get_rank()))
        with self._store_lock:
            self._open().set(own, json.dumps(known))
        missing = {rank: self._key(place, "ready", str(rank)) for rank in group.ranks}
        found: list[list[int]] = []
        deadline = time.monotonic() + group.limit.total_seconds()
        while missing:
            self.answer()
            for rank, key in [*missing.items()]:
                with self._store_lock:
                    if self._open().check([key]):
                        found += json.loads(self._open().get(key))
                        del missing[rank]
            if time.monotonic() > deadline:
                ranks = ", ".join(map(str, missing))
                raise CollectiveError(
                    f"{self.reason}; then rank {dist.get_rank()} came to the next forward, and "
                    f"rank {ranks} did not within the timeout of {group.limit.total_seconds():g} s"
                )
            if missing:
                time.sleep(_PAUSE_S)
        return found

    def _forget_notes(self) -> None:
        """Delete the notes of the recovery before, which all ranks have read by now."""
        if self._epoch == 0:
            return
        store, own, before = self._open(), str(dist.get_rank()), self._epoch - 1
        for place, _ in self._groups:
            for kind in ("stopped", "ready"):
                store.delete_key(self._key(place, kind, own, before))

    def _key(self, place: str, kind: str, rank: str, epoch: int | None = None) -> str:
        return f"{place}/{kind}/{self._epoch if epoch is None else epoch}/{rank}"

    def _open(self) -> dist.Store:
        if self._store is None:
            self._store = dist.PrefixStore("layerzero/recovery", own_connection())
        return self._store


def settle(waits: Sequence[Callable[[], Any]]) -> None:
    """Wait for what a failed pass has in flight; that it has failed is known."""
    for wait in waits:
        try:
            wait()
        except PeerRaised:
            continue
