"""Operation, the name of a collective, and Pending, the handle of one in flight."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from layerzero.comm.streams import Event
from layerzero.errors import CollectiveError
from layerzero.flat.placement import ShardGroup
from layerzero.watch.desync import DesyncDetector
from layerzero.watch.diagnosis import diagnose
from layerzero.watch.watchdog import Watchdog


@dataclass(slots=True, eq=False)
class Operation:
    """Identifies one collective: verb, unit, sequence number within this model."""

    verb: str
    unit: str
    number: int
    watchdog: Watchdog | None = None
    """Set where messages carry no name (`messages_carry_names`)."""
    detector: DesyncDetector | None = None
    """Set in a model whose messages carry names, except for tensor-parallel collectives."""
    model: int = 0
    """Number of the model on the group; 0 outside a model, and on groups it was not counted on."""
    timer: Any = None
    """Notes its times on whatever thread it is awaited (`HopTimer` of step_ledger), or None."""

    def __str__(self) -> str:
        return f"{self.verb} of {self.unit} (#{self.number})"

    def tag(self, nbytes: int) -> int:
        """See Note [A message carries its name] in messages.py. In [2**30, 2**31), clear of small
        user tags."""
        name = f"{self.verb}/{self.unit}/{self.number}/{nbytes}/{self.model}"
        return zlib.crc32(name.encode()) & 0x3FFFFFFF | 0x40000000


def messages_carry_names(group: ShardGroup, device: torch.device) -> bool:
    """See Note [A message carries its name] in messages.py"""
    return group.backend == "gloo" and device.type == "cpu"


class Pending:
    """Handle of a collective in flight."""

    peer = -1
    """Group rank of the peer whose message is awaited now; -1: all of them, or none yet."""
    works: Sequence[tuple[dist.Work, int]] | None = None
    """Each work with its peer's group rank (-1: all); None until issued, and of messages. Empty if
    there is none to wait for: a collective on the current stream is in order there by itself."""
    _finish: Callable[[], object] | None = None
    _done_event: Event = None

    def __init__(self, operation: Operation, group: ShardGroup, nbytes: int = 0) -> None:
        """`nbytes`: size of the whole tensor, or of each message if messages carry names. Ranks
        compare it."""
        self.operation = operation
        self.number = operation.number
        self.group = group
        self.nbytes = nbytes
        watchdog = operation.watchdog
        self._events_before = () if watchdog is None else watchdog.events_before()
        if operation.timer is not None:
            operation.timer.issued(nbytes if operation.detector is None else nbytes * group.size)

    @property
    def name(self) -> str:
        return str(self.operation)

    @property
    def is_reached(self) -> bool:
        return all(event.query() for event in self._events_before)

    @property
    def is_done(self) -> bool:
        """Whether the device (on CPU, the backend) has completed the collective."""
        if self._done_event is not None:
            return bool(self._done_event.query())
        return self.works is not None and all(work.is_completed() for work, _ in self.works)

    def start(self, issue: Callable[[], dist.Work | None]) -> None:
        """Call `issue`. It may return no work: then the collective runs on the current stream.

        Raises:
            CollectiveError: the call failed at once, for example because a peer is dead already.
        """
        try:
            work = issue()
        except RuntimeError as error:
            raise self.diagnose(error) from error
        if work is not None:
            self.works = ((work, -1),)
            return
        # Before `works`: the watchdog's thread must not take it for done in between.
        self._record_done()
        self.works = ()

    def _record_done(self) -> None:
        if self.operation.timer is not None:
            self.operation.timer.ended()
        if self.operation.watchdog is not None:
            self._done_event = self.operation.watchdog.record_event()

    def then(self, finish: Callable[[], object]) -> None:
        """Run `finish` in the first `wait`, once the data has arrived."""
        self._finish = finish

    def wait(self) -> Event:
        """Block until the result has arrived and no peer reads this rank's buffers any more.

        On a device with streams, order the current stream after that instead of blocking; it must
        be the stream on which the collective was started. Sends are awaited as well as receives
        because gloo drops a message whose handle is gone: a rank that has all it needs and exits,
        or drops the model, would leave its peers waiting.

        Returns:
            An event on that stream after all this; None if none was recorded.

        Raises:
            CollectiveError: a peer is dead, or did not take part within the timeout.
        """
        self.wait_for_data()
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()
            self._record_done()
        return self._done_event

    def wait_for_data(self) -> None:
        """The first part of `wait`, which another thread may do before this one calls `wait`."""
        if self._done_event is not None:
            return  # The stream was past it then.
        # Only on gloo: given a timeout, NCCL's `wait` blocks the host. There the backend and the
        # watchdog bound the wait.
        timed = self.group.backend == "gloo"
        detector = self.operation.detector
        if detector is not None and self.works != ():
            detector.begin_wait(self)
        try:
            for work, peer in self._all_works():
                self.peer = peer
                if timed:
                    work.wait(self.group.limit)
                else:
                    work.wait()
        except RuntimeError as error:
            raise self.diagnose(error) from error
        finally:
            if detector is not None:
                detector.waiting.discard(self)
        if detector is not None:
            detector.in_flight.discard(self)
        self._record_done()
        self.works = ()

    def _all_works(self) -> Sequence[tuple[dist.Work, int]]:
        """Called as a wait begins, of which its errors are part."""
        return self.works or ()

    def diagnose(self, error: RuntimeError) -> CollectiveError:
        """Make the error for a failed exchange with `peer`. Blocks the host for some seconds."""
        detector = self.operation.detector
        divergence = None if detector is None else detector.latest_verdict
        return diagnose(str(self.operation), self.group, self.peer, error, divergence)


def start(
    operation: Operation, nbytes: int, group: ShardGroup, issue: Callable[[], dist.Work | None]
) -> Pending:
    """Issue a collective of the backend, watched by the watchdog. Raises as `Pending.start`."""
    pending = Pending(operation, group, nbytes)
    if operation.watchdog is not None:
        operation.watchdog.issued.append(pending)
    pending.start(issue)
    return pending
