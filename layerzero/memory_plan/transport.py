"""Groups without processes, and streams without threads: what a planned model runs on.

Nothing is sent. A group has the size, this rank's number and the backend of the planned one, so the
engine allocates what it would allocate there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from layerzero.comm.gloo.threads import OnThread
from layerzero.comm.streams import ChainedCollectives, InlineStream, Streams, Waitable
from layerzero.flat.groups import DEFAULT_TIMEOUT
from layerzero.flat.placement import ShardGroup
from layerzero.memory_budget.learner import LateStream
from layerzero.memory_budget.storages import StorageCount
from layerzero.optional.exchange import Exchange
from layerzero.step.operations import Operations
from layerzero.watch.watchdog import Watchdog


class _Sent:
    """A `dist.Work` that is over."""

    def wait(self, *_: object) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class _Nowhere:
    """A process group whose collectives send nothing."""

    def __getattr__(self, name: str) -> Callable[..., _Sent]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: _Sent()


def planned_group(rank: int, ranks: Sequence[int], backend: str) -> ShardGroup:
    """A group of these global ranks, of which this process is the one at place `rank`."""
    group = cast("dist.ProcessGroup", _Nowhere())
    return ShardGroup(group, rank, tuple(ranks), backend, DEFAULT_TIMEOUT)


def planned_axes(mesh: DeviceMesh | None, backend: str) -> tuple[ShardGroup, ...]:
    """A group for each axis of the mesh of DTensor parameters."""
    if mesh is None:
        return ()
    groups = [mesh.get_group(axis) for axis in range(mesh.ndim)]
    return tuple(
        planned_group(mesh.get_local_rank(axis), dist.get_process_group_ranks(group), backend)
        for axis, group in enumerate(groups)
    )


class _Unwatched:
    """Stands for a `DesyncDetector`: no rank is late."""

    def __init__(self) -> None:
        self.issued: deque[object] = deque(maxlen=1)
        self.waiting = self.in_flight = WeakSet[Any]()  # Not all are waited for.

    def begin_wait(self, _: object) -> None:
        return None


class PlannedOperations(Operations):
    """Names collectives; counts no models on groups and starts no watchdog."""

    def __init__(self, device: torch.device, streams: Streams) -> None:
        super().__init__(device, streams, ())
        self._detector = cast("Any", _Unwatched())

    def _watchdog_of(self, group: ShardGroup) -> Watchdog | None:
        return None


class PlannedExchange(Exchange):
    """Every rank does what this one does."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def name(self, addition: str) -> None:
        pass

    def __call__(self, row: Sequence[int]) -> list[list[int]]:
        return [list(row)]


class _Reducing(LateStream):
    """The reduce stream on gloo: what its thread does is done when it is waited for, the latest
    that the thread of a real model does it."""

    def __init__(self, count: StorageCount) -> None:
        super().__init__()
        self._count = count
        self.last: OnThread | None = None
        """The work that runs, else what was queued last."""

    def _enqueue(self, work: Callable[[], Waitable | None]) -> Waitable:
        def counted() -> Waitable | None:
            # What was queued after it is not sent yet.
            queued, self.last = self.last, item
            with self._count.of_kind("reduction buffers"):
                started = work()
            self.last = queued
            return started

        item = self.last = cast("OnThread", super()._enqueue(counted))
        return item


class _Gathering(InlineStream):
    """The unshard stream on gloo: whatever waits for a gather finds earlier reductions done.

    Messages of a pair of ranks arrive in order.
    """

    def __init__(self, reduce: _Reducing) -> None:
        self._reduce = reduce

    def enqueue_wait(
        self, pending: Waitable, on_done: Callable[[], None] | None = None
    ) -> Waitable:
        return _Arriving(self._reduce.last, pending)


class _Arriving(NamedTuple):
    """A gather, and the last reduction before it."""

    before: OnThread | None
    pending: Waitable

    def wait(self) -> None:
        if self.before is not None and not self.before.is_done:
            self.before.wait()
        self.pending.wait()


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

    def __init__(self, device: torch.device, on_gloo: bool, count: StorageCount) -> None:
        """
        Args:
            device: where the tensors seem to be: the CPU.
            on_gloo: whether it is the CPU that is planned.
        """
        super().__init__(device)
        self._is_apart = not on_gloo
        if on_gloo:
            self.reduce = reduce = _Reducing(count)
            self.unshard = _Gathering(reduce)
        else:
            self.pre_unshard = self.unshard = self.reduce = self.offload = _OnDevice()

    @property
    def are_apart(self) -> bool:
        return self._is_apart
