"""Streams and events behind one interface, for devices that have them and for the CPU.

On a device with streams a `CommStream` is a side stream: work is queued on it, an `Event` is one of
torch's, and waiting for an event orders streams without blocking the host. On CPU a `CommStream`
runs its work at once on the host, so only the collectives themselves, which are asynchronous,
overlap with compute; events are None, because the host runs in order.

On CPU with gloo the reduce stream also has a thread. It finishes each reduction as soon as its data
has arrived: it sums, and frees the buffers that only the exchange needed. Otherwise they would stay
until the next unit's backward is done. An all-gather prefetched in backward starts after the
pending reductions, so that its buffer can reuse their memory.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from layerzero.flat.device_streams import stream_interface
from layerzero.watch.events import Event as Event
from layerzero.watch.events import PooledEvent, event_pool
from layerzero.watch.thread import end_at_exit


class Waitable(Protocol):
    """Handle of work in flight, such as a collective."""

    def wait(self) -> Event:
        """Order the current stream after the work and its use of buffers; on CPU, block.
        Return an event recorded there after that, if there is one."""


ChainedCollectives = Callable[[Callable[[], None]], None]
"""Runs dependent collectives in order. It receives a callback, and calls it once the first
collective has finished reading its input."""


class _Done:
    """Handle of work that the host has already finished."""

    def wait(self) -> None:
        return None


_DONE = _Done()


class InlineStream:
    """The stream of a device that has none: work runs at once, in host order."""

    def __enter__(self) -> InlineStream:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def wait(self, event: Event) -> None:
        """Nothing to order."""

    def record_event(self) -> Event:
        return None

    def enqueue_wait(
        self, pending: Waitable, on_done: Callable[[], None] | None = None
    ) -> Waitable:
        """Return `pending` itself, to be waited for by its user. `on_done` is not called."""
        return pending

    def start_after_pending(self, issue: Callable[[], Waitable]) -> Waitable:
        """Start a collective at once; a `FinishingStream` finishes its pending work first."""
        return issue()

    def start_after(self, first: Waitable, issue: Callable[[], Waitable]) -> Waitable:
        """Start a collective that needs the result of `first`. Blocks the host until that is done.

        `first` was enqueued on this stream.
        """
        first.wait()
        return issue()

    def run(self, collectives: ChainedCollectives, input_done: Callable[[], None]) -> Waitable:
        """Run dependent collectives; see `ChainedCollectives`. Blocks the host."""
        collectives(input_done)
        return _DONE

    def drain_handle(self) -> Waitable:
        """Handle for all work queued on the stream so far; here it has all run."""
        return _DONE

    def wait_until_idle(self) -> None:
        """Block the host until a thread of the stream has nothing to do, and forget its work."""


class ChainingStream(InlineStream):
    """An inline stream with a thread, which starts a collective once another is done."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[OnThread | None] = queue.SimpleQueue()
        self._last: OnThread | None = None
        self._thread: threading.Thread | None = None

    def start_after(self, first: Waitable, issue: Callable[[], Waitable]) -> Waitable:
        """Let the thread wait for `first`, then start the other. Does not block the host."""

        def chained() -> Waitable:
            first.wait()
            return issue()

        return self._enqueue(chained)

    def wait_until_idle(self) -> None:
        # Forgotten: its error would keep the frames of all callers of `wait` alive.
        last, self._last = self._last, None
        if last is not None:
            last.wait_until_idle()

    def _enqueue(self, work: Callable[[], Waitable | None]) -> Waitable:
        if self._thread is None:
            # A daemon: a thread that waits for a dead peer must not keep the process from exiting.
            self._thread = threading.Thread(
                target=_run_all, args=(self._queue,), name="layerzero-stream", daemon=True
            )
            self._thread.start()
            weakref.finalize(self, self._queue.put, None)
            end_at_exit(self._thread, partial(self._queue.put, None))
        self._last = OnThread(work, self._thread)
        self._queue.put(self._last)
        return self._last


class FinishingStream(ChainingStream):
    """An inline stream whose thread finishes its collectives, in order of issue."""

    def enqueue_wait(
        self, pending: Waitable, on_done: Callable[[], None] | None = None
    ) -> Waitable:
        """Let the thread wait for the collective, then call `on_done`. Does not block the host."""

        def finish() -> None:
            pending.wait()
            if on_done is not None:
                on_done()

        return self._enqueue(finish)

    def start_after_pending(self, issue: Callable[[], Waitable]) -> Waitable:
        """Start a collective once all work enqueued on this stream so far is finished."""
        return issue() if self._last is None or self._last.is_done else self._enqueue(issue)

    def run(self, collectives: ChainedCollectives, input_done: Callable[[], None]) -> Waitable:
        """Let the thread run the collectives. Does not block the host."""
        return self._enqueue(lambda: collectives(input_done))


class OnThread:
    """Work for the stream's thread; may start a collective, which `wait` then waits for as well."""

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
        """Do the work, on the stream's thread; `wait` raises its error."""
        try:
            assert self._work is not None, "runs once"
            self._started = self._work()
        except BaseException as error:
            self._error = error
        finally:
            self._work = None
            self._has_run.set()

    def wait_until_idle(self) -> None:
        """Wait until it has run."""
        while not self._has_run.wait(timeout=1.0):
            if not self._thread.is_alive():
                raise RuntimeError(
                    "the thread that finishes reductions has ended: was the process forked after "
                    "training began? Wrap the model in the process that trains it"
                )

    def wait(self) -> None:
        self.wait_until_idle()
        if self._error is not None:
            raise self._error
        if self._started is not None:
            self._started.wait()


def _run_all(work: queue.SimpleQueue[OnThread | None]) -> None:
    while (item := work.get()) is not None:
        item.run()
        del item  # Else the loop variable keeps its result alive until the next item comes.


class DeviceStream:
    """A side stream. Enter it to queue work there; buffers allocated inside belong to it."""

    def __init__(
        self, device: torch.device, entered: list[DeviceStream], is_urgent: bool = False
    ) -> None:
        """`entered`: the streams entered now, of one model; `is_urgent`: its kernels go before
        those that wait on ordinary streams."""
        self._module = module = stream_interface(device)
        self._index = device.index
        self._stream = stream = _new_stream(module, device, is_urgent)
        # torch's own streams are contexts themselves, and entered without a call of Python code.
        # Such a context may be used again, but not inside itself.
        self._context = stream if hasattr(stream, "__enter__") else module.stream(stream)
        self._events = event_pool(module, device)
        self._entered = entered
        self.events_before: tuple[PooledEvent, ...] = ()
        """Events after which the device comes to what is queued here next."""

    def __enter__(self) -> DeviceStream:
        self._context.__enter__()
        self._entered.append(self)
        return self

    def __exit__(self, *raised: Any) -> None:
        self._entered.pop()
        self._context.__exit__(*raised)

    def wait(self, event: Event) -> None:
        """Order work queued from now on after `event`. Does not block the host."""
        if event is not None:
            event.wait(self._stream)
            self.events_before += (event,)

    def record_event(self) -> PooledEvent:
        event = self._events.record(self._stream)
        self.events_before = (event,)
        return event

    def start_after_pending(self, issue: Callable[[], Waitable]) -> Waitable:
        """Start a collective at once: the allocator reuses memory in stream order anyway."""
        return issue()

    def start_after(self, first: Waitable, issue: Callable[[], Waitable]) -> Waitable:
        """Start a collective at once: it is queued on the stream after `first`."""
        return issue()

    def run(self, collectives: ChainedCollectives, input_done: Callable[[], None]) -> Waitable:
        """Queue the collectives. `input_done` is not called: no event reports to the host
        that the device has read the input."""
        collectives(lambda: None)
        return self.drain_handle()

    def drain_handle(self) -> Waitable:
        """Handle that orders the current stream after all work queued on this one so far."""
        return _OnStream(self, self.record_event(), None)

    def current_stream(self) -> Any:
        """The current stream of the model's device, which may not be the current device."""
        return self._module.current_stream(self._index)

    def enqueue_wait(
        self, pending: Waitable, on_done: Callable[[], None] | None = None
    ) -> Waitable:
        """Order the stream after the collective, the last that was queued on it, and return a
        handle to an event recorded there.

        `on_done` is not called: no event reports to the host that the device is done.
        """
        return _OnStream(self, pending.wait() or self.record_event(), pending)


def _new_stream(module: Any, device: torch.device, is_urgent: bool) -> Any:
    if is_urgent:
        with suppress(TypeError):  # Of devices whose streams have no priorities.
            return module.Stream(device=device, priority=-1)
    return module.Stream(device=device)


class _OnStream(NamedTuple):
    """A collective queued on a side stream; waiting orders the current stream after it."""

    stream: DeviceStream
    event: PooledEvent
    pending_keepalive: Waitable | None

    def wait(self) -> None:
        self.event.wait(self.stream.current_stream())


CommStream = InlineStream | DeviceStream


class Streams:
    """The streams of one model.

    Attributes:
        pre_unshard: casts of main shards to the compute dtype; apart from `unshard`, so that the
            cast for the next unit does not queue behind a gather.
        unshard: all-gathers, and the allocation of the full buffers that they fill.
        reduce: gradient reductions.
        offload: copies of gradients between device and host.
    """

    def __init__(self, device: torch.device, finishing_thread: bool) -> None:
        """`finishing_thread`: on CPU, give the unshard and reduce streams a thread; for backends
        on which the engine does the sums itself (gloo)."""
        self._module: Any = None
        self._index = device.index
        self._entered: list[DeviceStream] = []
        if device.type == "cpu":
            self.pre_unshard: CommStream = InlineStream()
            self.unshard: CommStream = ChainingStream() if finishing_thread else InlineStream()
            self.reduce: CommStream = FinishingStream() if finishing_thread else InlineStream()
            self.offload: CommStream = InlineStream()
        else:
            self._module = stream_interface(device)
            self._events = event_pool(self._module, device)
            # Compute waits for what these three do, and fills the device meanwhile: at the priority
            # of compute a gather could start only once the kernels queued there leave room.
            self.pre_unshard = DeviceStream(device, self._entered, is_urgent=True)
            self.unshard = DeviceStream(device, self._entered, is_urgent=True)
            self.reduce = DeviceStream(device, self._entered, is_urgent=True)
            self.offload = DeviceStream(device, self._entered)
        self._usual = self.reduce

    def finish_late(self, stream: CommStream | None) -> None:
        """Let `stream` stand for a reduce stream with a thread; None: no longer. Between passes."""
        if isinstance(self._usual, FinishingStream):
            self.reduce = self._usual if stream is None else stream

    @property
    def are_apart(self) -> bool:
        """Whether memory belongs to the stream that it was allocated on."""
        return self._module is not None

    def wait_until_idle(self) -> None:
        """Block the host until the threads of streams have nothing to do; devices have none."""
        for stream in (self.unshard, self.reduce):
            if isinstance(stream, InlineStream):
                stream.wait_until_idle()

    def record_compute_event(self) -> Event:
        """Record an event on the compute stream, after all work queued there; None on CPU."""
        if self._module is None:
            return None
        return self._events.record(self._module.current_stream(self._index))

    def record_event(self) -> Event:
        """Record an event on the stream of these that is entered, else as above."""
        return self._entered[-1].record_event() if self._entered else self.record_compute_event()

    def events_before(self) -> tuple[PooledEvent, ...]:
        """Events after which the device comes to what is queued next on that stream."""
        if self._entered:
            return self._entered[-1].events_before
        event = self.record_compute_event()
        return () if event is None else (event,)

    def wait_on_host(self, event: Event) -> None:
        """Block the host until the device has reached `event`."""
        if event is not None:
            event.synchronize()
