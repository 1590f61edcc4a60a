"""Groups without processes, and streams without threads: what a planned model runs on.

Nothing is sent. A group has the size, this rank's number and the backend of the planned one, so the
engine allocates what it would allocate there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from layerzero.comm.pending import Operation
from layerzero.comm.streams import (
    ChainedCollectives,
    ChainingStream,
    CommStream,
    FinishingStream,
    InlineStream,
    Streams,
    Waitable,
)
from layerzero.flat.groups import DEFAULT_TIMEOUT, ShardGroup
from layerzero.optional.exchange import Exchange
from layerzero.step.operations import Operations
from layerzero.step.timeouts import Phases
from layerzero.watch.watchdog import Watchdog


class _Sent:
    """A `dist.Work` that is over once it is waited for; then all sent before it is over as well."""

    def __init__(self, pace: Pace) -> None:
        self._before = pace.before_arrival()

    def wait(self, *_: object) -> bool:
        if self._before is not None:
            self._before.run()
        return True

    def is_completed(self) -> bool:
        return True


class _Nowhere:
    """A process group whose collectives send nothing."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace

    def __getattr__(self, name: str) -> Callable[..., _Sent]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: _Sent(self._pace)


class PlannedGroups:
    """Makes the groups of one rank of a planned world."""

    def __init__(self, rank: int, backend: str, pace: Pace) -> None:
        self._rank = rank
        self._backend = backend
        self._pace = pace

    def __call__(self, ranks: Sequence[int]) -> ShardGroup:
        ordered = tuple(sorted(ranks))
        return ShardGroup(
            process_group=cast("dist.ProcessGroup", _Nowhere(self._pace)),
            rank=ordered.index(self._rank),
            ranks=ordered,
            backend=self._backend,
            timeout=DEFAULT_TIMEOUT,
        )


def planned_axes(mesh: DeviceMesh | None, backend: str) -> tuple[ShardGroup, ...]:
    """A group for each axis of the mesh of DTensor parameters."""
    if mesh is None:
        return ()
    return tuple(
        ShardGroup(
            process_group=cast("dist.ProcessGroup", _Nowhere(Pace())),
            rank=mesh.get_local_rank(axis),
            ranks=tuple(dist.get_process_group_ranks(mesh.get_group(axis))),
            backend=backend,
            timeout=DEFAULT_TIMEOUT,
        )
        for axis in range(mesh.ndim)
    )


class _Unwatched:
    """Stands for a `DesyncDetector`: no rank is late."""

    def __init__(self) -> None:
        self.issued: deque[object] = deque(maxlen=1)
        self.waiting: set[object] = set()
        self.in_flight: set[object] = set()

    def begin_wait(self, _: object) -> None:
        return None


class PlannedOperations(Operations):
    """Names collectives; counts no models on groups and starts no watchdog."""

    def __init__(self, device: torch.device, groups: list[ShardGroup]) -> None:
        self.prefix = ""
        self.failure = None
        self.phases = Phases(device, groups)
        self.count = 0
        self._numbers = {}
        self._watchdogs = {}
        self._detector = cast("Any", _Unwatched())

    def _number_on(self, group: ShardGroup) -> int:
        return 0

    def _watchdog_of(self, group: ShardGroup) -> Watchdog | None:
        return None

    def next_on_host(self, verb: str, unit: str, group: ShardGroup) -> Operation:
        return self.next(verb, unit, group)


class PlannedExchange(Exchange):
    """Every rank does what this one does."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def name(self, addition: str) -> None:
        pass

    def __call__(self, row: Sequence[int]) -> list[list[int]]:
        return [list(row)]


class Pace:
    """When the threads of streams run: at once, or not before somebody waits for their work.

    Those of a real model run some time in between. Data of one pair of ranks arrives in order, so
    who waits for a gather finds all earlier reductions done.
    """

    last: _Later | None
    """The reduction that was queued last."""
    running: _Later | None
    """The work that runs now; what was queued after it is not sent yet."""

    def __init__(self) -> None:
        self.is_late, self._in_order = False, True
        self.last = self.running = None

    @contextmanager
    def run(self, work: _Later) -> Iterator[None]:
        """`work` runs inside."""
        before, self.running = self.running, work
        try:
            yield
        finally:
            self.running = before

    def queued(self, work: _Later) -> None:
        self.last = work

    def set_late(self, is_late: bool, in_order: bool = True) -> None:
        """`in_order`: who waits for a gather finds earlier reductions done."""
        self.is_late, self._in_order = is_late, in_order

    def before_arrival(self) -> _Later | None:
        """The work that is over once what is sent now has arrived."""
        return self.running or (self.last if self._in_order else None)


class _Later:
    """Work of a stream's thread; waiting for it runs it, after what was queued before."""

    def __init__(
        self, work: Callable[[], Waitable | None], queue: deque[_Later], pace: Pace
    ) -> None:
        self._work = work
        self._pace = pace
        self._queue = queue
        self._started: Waitable | None = None
        self._has_begun = False
        self.is_done = False

    def run(self) -> None:
        # A later hop of the work that runs now waits in here, too.
        while not self._has_begun:
            first = self._queue.popleft()
            first._has_begun = True
            with self._pace.run(first):
                first._started = first._work()
            first.is_done = True
            del first._work

    wait_until_idle = run

    def wait(self) -> None:
        self.run()
        if self._started is not None:
            self._started.wait()


class _Paced:
    """The part of a stream with a thread that runs its work here instead."""

    def __init__(self, pace: Pace, kept: Callable[[], Any]) -> None:
        self._pace = pace
        self._work: deque[_Later] = deque()
        self._last: Any = None
        self._kept = kept

    def _enqueue(self, work: Callable[[], Waitable | None]) -> Waitable:
        def as_engine() -> Waitable | None:
            with self._kept():
                return work()

        self._last = _Later(as_engine, self._work, self._pace)
        self._work.append(self._last)
        if not self._pace.is_late:
            self._last.run()
        return cast("Waitable", self._last)


class _Chaining(_Paced, ChainingStream):
    """The unshard stream on gloo."""


class _Finishing(_Paced, FinishingStream):
    """The reduce stream on gloo."""

    def _enqueue(self, work: Callable[[], Waitable | None]) -> Waitable:
        item = super()._enqueue(work)
        self._pace.queued(cast("_Later", item))
        return item


class _OnDevice(InlineStream):
    """A stream of a device, as the host sees it: memory counts as free when the host frees it."""

    def run(self, collectives: ChainedCollectives, input_done: Callable[[], None]) -> Waitable:
        collectives(lambda: None)
        return self.drain_handle()

    def enqueue_wait(
        self, pending: Waitable, on_done: Callable[[], None] | None = None
    ) -> Waitable:
        pending.wait()
        return self.drain_handle()


class PlannedStreams(Streams):
    """The streams of a planned model."""

    def __init__(
        self,
        device: torch.device,
        finishing_thread: bool,
        pace: Pace,
        of_reductions: Callable[[], Any],
        on_accelerator: bool,
    ) -> None:
        """
        Args:
            device: where the tensors seem to be: the CPU.
            of_reductions: a context around what the reduce stream's thread does.
            on_accelerator: the planned device has streams.
        """
        super().__init__(device, finishing_thread=False)
        self._is_apart = on_accelerator
        self._pace = pace
        if on_accelerator:
            self.pre_unshard = self.unshard = self.reduce = self.offload = _OnDevice()
        elif finishing_thread:
            self.unshard = _Chaining(pace, of_reductions)
            self.reduce = _Finishing(pace, of_reductions)

    def finish_late(self, stream: CommStream | None) -> None:
        is_late = stream is not None  # A `LateStream`: only who waits for a reduction finishes it.
        self._pace.set_late(is_late, in_order=not is_late)

    @property
    def are_apart(self) -> bool:
        return self._is_apart
