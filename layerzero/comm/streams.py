"""Lanes: the one place that knows whether a device has streams.

On a device with streams a lane is a side stream: work is queued on it, a `Mark` is an event, and
waiting for one orders streams without blocking the host. On CPU a lane runs at once on the host,
and what overlaps with compute is the collective itself, through its asynchronous handle; a mark
orders nothing there, because the host is already in order. The reduce lane of gloo on CPU has a
thread besides, which finishes reductions as soon as their data is there: the sum, and freeing the
buffers that only the exchange needed, which otherwise would wait for the next unit to be done. A
gather ahead in backward starts behind them, so that its buffer takes their place in memory.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol

import torch

Mark = Any
"""An event on a device with streams; None on CPU."""


class Waitable(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Order what comes next on the compute lane after the collective and its buffers' use."""


Hops = Callable[[Callable[[], None]], None]
"""Runs dependent collectives in order. Receives a callback, and calls it once the first collective
has finished reading its input."""


class _Done:
    """What there is to wait for where the host is in order."""

    def wait(self) -> None:
        return None


_DONE = _Done()


class HostLane:
    """A lane of a device without streams: everything is in host order already."""

    def __enter__(self) -> HostLane:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def wait(self, mark: Mark) -> None:
        """Nothing to order."""

    def mark(self) -> Mark:
        return None

    def settle(self, pending: Waitable, then: Callable[[], None] | None = None) -> Waitable:
        """The collective runs by itself; whoever needs the result waits for it."""
        return pending

    def behind(self, issue: Callable[[], Waitable]) -> Waitable:
        """Start a collective once what the lane settled before is finished."""
        return issue()

    def after(self, first: Waitable, issue: Callable[[], Waitable]) -> Waitable:
        """Start a collective that needs the result of one settled on this lane."""
        first.wait()
        return issue()

    def run(self, hops: Hops, input_done: Callable[[], None]) -> Waitable:
        """Run collectives each of which needs the one before; see `Hops`."""
        hops(input_done)
        return _DONE

    def so_far(self) -> Waitable:
        """To wait for all that was queued on the lane."""
        return _DONE


class ChainingHostLane(HostLane):
    """A host lane with a thread, for what starts when something else is done."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[_OnThread | None] = queue.SimpleQueue()
        self._last: _OnThread | None = None
        self._thread: threading.Thread | None = None

    def after(self, first: Waitable, issue: Callable[[], Waitable]) -> Waitable:
        """Let the thread wait for `first`, and start the other."""

        def chained() -> Waitable:
            first.wait()
            return issue()

        return self._enqueue(chained)

    def _enqueue(self, work: Callable[[], Waitable | None]) -> Waitable:
        if self._thread is None:
            # A daemon: waiting for a dead peer must not keep the process from ending.
            self._thread = threading.Thread(
                target=_run_all, args=(self._queue,), name="layerzero-lane", daemon=True
            )
            self._thread.start()
            weakref.finalize(self, self._queue.put, None)
        self._last = _OnThread(work, self._thread)
        self._queue.put(self._last)
        return self._last


class FinishingHostLane(ChainingHostLane):
    """A host lane whose collectives are finished by its thread, in order of issue."""

    def settle(self, pending: Waitable, then: Callable[[], None] | None = None) -> Waitable:
        """Let the thread wait for the collective and call `then`."""

        def finish() -> None:
            pending.wait()
            if then is not None:
                then()

        return self._enqueue(finish)

    def behind(self, issue: Callable[[], Waitable]) -> Waitable:
        """Start a collective once what the lane settled before is finished."""
        return issue() if self._last is None or self._last.is_done else self._enqueue(issue)

    def run(self, hops: Hops, input_done: Callable[[], None]) -> Waitable:
        """Let the thread run them."""
        return self._enqueue(lambda: hops(input_done))


class _OnThread:
    """Work for the lane's thread, which may start a collective to wait for in turn."""

    def __init__(self, work: Callable[[], Waitable | None], thread: threading.Thread) -> None:
        self._work: Callable[[], Waitable | None] | None = work
        self._thread = thread
        self._started: Waitable | None = None
        self._error: BaseException | None = None
        self._has_run = threading.Event()

    @property
    def is_done(self) -> bool:
        return self._has_run.is_set()

    def run(self) -> None:
        """The thread's part; an error waits for whoever waits."""
        try:
            assert self._work is not None, "runs once"
            self._started = self._work()
        except BaseException as error:
            self._error = error
        finally:
            self._work = None
            self._has_run.set()

    def wait(self) -> None:
        while not self._has_run.wait(timeout=1.0):
            if not self._thread.is_alive():
                raise RuntimeError(
                    "the thread that finishes reductions is gone: was the process forked after "
                    "training had begun? Wrap the model in the process that trains it"
                )
        if self._error is not None:
            raise self._error
        if self._started is not None:
            self._started.wait()


def _run_all(work: queue.SimpleQueue[_OnThread | None]) -> None:
    while (item := work.get()) is not None:
        item.run()
        del item  # or its result would live until the next one


class DeviceLane:
    """A side stream. Enter it to queue work there; buffers allocated inside belong to it."""

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device)
        self._stream = self._module.Stream(device=device)
        self._entered: list[Any] = []

    def __enter__(self) -> DeviceLane:
        context = self._module.stream(self._stream)
        context.__enter__()
        self._entered.append(context)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._entered.pop().__exit__(kind, error, traceback)

    def wait(self, mark: Mark) -> None:
        """Queue nothing further before what `mark` stands for has happened."""
        if mark is not None:
            self._stream.wait_event(mark)

    def mark(self) -> Mark:
        return self._stream.record_event()

    def behind(self, issue: Callable[[], Waitable]) -> Waitable:
        """Start a collective at once: memory is the allocator's business, in stream order."""
        return issue()

    def after(self, first: Waitable, issue: Callable[[], Waitable]) -> Waitable:
        """Start the other at once: it queues behind what was settled on the lane."""
        return issue()

    def run(self, hops: Hops, input_done: Callable[[], None]) -> Waitable:
        """Queue them. `input_done` is not called: the host cannot know when the device is there."""
        hops(lambda: None)
        return self.so_far()

    def so_far(self) -> Waitable:
        """To order the current stream after all that was queued on the lane."""
        return _OnLane(self._module, self.mark(), None)

    def settle(self, pending: Waitable, then: Callable[[], None] | None = None) -> Waitable:
        """Order the lane after the collective and hand out the lane's own mark of it.

        `then` is not called: the host cannot know when the device is there.
        """
        pending.wait()
        return _OnLane(self._module, self.mark(), pending)


class _OnLane:
    """A collective queued on a side stream; waiting orders the current stream after it."""

    def __init__(self, module: Any, mark: Mark, pending_keepalive: Waitable | None) -> None:
        self._module = module
        self._mark = mark
        self._pending_keepalive = pending_keepalive

    def wait(self) -> None:
        self._module.current_stream().wait_event(self._mark)


Lane = HostLane | DeviceLane


class Streams:
    """The lanes of one model.

    Attributes:
        pre_unshard: casts of main shards; beside `unshard` so that a cast for the next unit does
            not queue behind a gather.
        unshard: all-gathers into full buffers, which are allocated there.
        reduce: gradient reductions.
        offload: copies of gradients between device and host.
    """

    def __init__(self, device: torch.device, finishing_thread: bool) -> None:
        """`finishing_thread`: on CPU, for backends whose sums are the engine's own."""
        self._module = None if device.type == "cpu" else torch.get_device_module(device)
        self.pre_unshard: Lane
        self.unshard: Lane
        self.reduce: Lane
        self.offload: Lane
        if device.type == "cpu":
            self.pre_unshard = HostLane()
            self.unshard = ChainingHostLane() if finishing_thread else HostLane()
            self.reduce = FinishingHostLane() if finishing_thread else HostLane()
            self.offload = HostLane()
        else:
            self.pre_unshard, self.unshard = DeviceLane(device), DeviceLane(device)
            self.reduce, self.offload = DeviceLane(device), DeviceLane(device)

    def mark_compute(self) -> Mark:
        """A mark behind everything queued on the compute stream so far."""
        if self._module is None:
            return None
        return self._module.current_stream().record_event()

    def wait_on_host(self, mark: Mark) -> None:
        """Block the host until what `mark` stands for has happened."""
        if mark is not None:
            mark.synchronize()
