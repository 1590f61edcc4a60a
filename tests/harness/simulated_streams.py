"""Streams and events of the simulated device, and how far the device has come.

A stream is a vector clock: for each stream, how many of its actions are known to have happened
before whatever is queued next (Mattern, Virtual Time and Global States of Distributed Systems,
1989). The host has a clock too; what it did before it queued something has happened.

The device is behind the host. When the host asks an event (`query`), the answer is False until the
host has done `lag` more things, or has waited for something later; a question counts as one.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

Clock = dict[int, int]
"""Stream -> how many of its actions are known to have happened."""

COMES_NEVER = 1 << 60
"""A lag: the device finishes nothing that the host does not wait for."""


def merge(clock: Clock, other: Clock) -> None:
    for stream, time in other.items():
        if clock.get(stream, 0) < time:
            clock[stream] = time


def covers(clock: Clock, other: Clock) -> bool:
    return all(clock.get(stream, 0) >= time for stream, time in other.items())


class Host:
    """What the host knows, and what the device has done."""

    def __init__(self, lag: int, on_wait: Callable[[str], None]) -> None:
        """`on_wait` is called when the host blocks until the device has come somewhere."""
        self.clock: Clock = {}
        self.on_wait = on_wait
        self.num_actions = 0
        self.lag = lag
        self._done: Clock = {}
        self._thread = threading.get_ident()
        self._lock = threading.Lock()
        self.num_answers = {False: 0, True: 0}
        """How often `query` gave each answer."""
        self.capture: Any = None
        """The graph that is captured now, or None."""
        self.on_fault: Callable[[str], None] = lambda _: None
        """Called with what a capture, or a replay, forbids."""

    def refuse_in_capture(self, what: str) -> None:
        """A capture is under way in this thread: it cannot contain this."""
        if self.capture is not None and threading.get_ident() == self._thread:
            self.on_fault(what)

    def wait(self, clock: Clock, what: str) -> None:
        """Block until the device has come to `clock`."""
        self.refuse_in_capture(f"the host waits ({what})")
        if not covers(self.clock, clock):
            self.on_wait(what)
            self._learn(clock)

    def ask(self, clock: Clock, due: int) -> bool:
        """Whether the device has come to `clock`. Any thread may ask."""
        with self._lock:
            self.num_actions += 1
            is_done = covers(self._done, clock) or self.num_actions >= due
            self.num_answers[is_done] += 1
        if is_done:
            self._learn(clock)
        return is_done

    def _learn(self, clock: Clock) -> None:
        with self._lock:
            merge(self._done, clock)
        # What another thread has learned orders nothing that this one does.
        if threading.get_ident() == self._thread:
            merge(self.clock, clock)


class Stream:
    """A queue of the device; what it has waited for is in its clock."""

    _ids = itertools.count()

    def __init__(self, host: Host, index: int = 0, name: str = "") -> None:
        self.id = next(Stream._ids)
        self.index = index
        self.name = name or f"side stream {self.id}"
        self.clock: Clock = {self.id: 0}
        self.host = host
        self.capture: Any = None
        """The graph that records what is queued here, or None."""

    def tick(self) -> None:
        """One more action, queued by the host after all it did."""
        self.host.num_actions += 1
        merge(self.clock, self.host.clock)
        self.clock[self.id] += 1

    def record_event(self, event: Event | None = None) -> Event:
        event = Event(self.host) if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        if event.clock:
            self._join(event.capture)
        merge(self.clock, event.clock)

    def wait_stream(self, stream: Stream) -> None:
        self._join(stream.capture)
        merge(self.clock, stream.clock)

    def _join(self, capture: Any) -> None:
        """A stream that waits for what a graph records is recorded, too."""
        if capture is not None and capture is not self.host.capture:
            self.host.on_fault(f"{self.name} waits for an event of a capture that has ended")
        elif capture is not None and self.capture is None:
            capture.admit(self)
        elif capture is None and self.capture is not None:
            self.host.on_fault(f"{self.name} waits in a capture for an event of before it")

    def synchronize(self) -> None:
        self.host.wait(self.clock, f"synchronize of {self.name}")


class HostStream(Stream):
    """What the host does itself, in its own order; its clock is the host's."""

    def __init__(self, host: Host) -> None:
        super().__init__(host, name="the host")
        host.clock = self.clock


class Event:
    """A place in a stream. Recorded again it is another place: whoever waits later waits for that.

    As on CUDA it belongs to the device of the stream that it was first recorded on.
    """

    def __init__(self, host: Host) -> None:
        self.clock: Clock = {}
        self._host = host
        self._index: int | None = None
        self._due = 0
        self._stream = "no stream"
        self.capture: Any = None
        """The graph that recorded it; the host may never ask for such an event."""

    def record(self, stream: Stream) -> None:
        if self._index not in (None, stream.index):
            raise RuntimeError(
                f"an event of device {self._index} is recorded on a stream of {stream.index}"
            )
        self._index, self._stream = stream.index, stream.name
        self.clock = dict(stream.clock)
        self.capture = stream.capture
        self._due = self._host.num_actions + self._host.lag

    def wait(self, stream: Stream) -> None:
        stream.wait_event(self)

    def query(self) -> bool:
        self._host.refuse_in_capture("the host asks for an event")
        if self.capture is not None:
            self._host.on_fault("the host asks for an event of a capture")
        return not self.clock or self._host.ask(self.clock, self._due)

    def synchronize(self) -> None:
        """The host waits."""
        self._host.wait(self.clock, f"synchronize of an event on {self._stream}")
