"""Streams and events behind one interface, for devices that have them and for the CPU.

On a device with streams a `CommStream` is a side stream: work is queued on it, an `Event` is one of
torch's, and waiting for an event orders streams without blocking the host. On CPU a `CommStream`
runs its work at once on the host, so only the collectives themselves, which are asynchronous,
overlap with compute; events are None, because the host runs in order.

On CPU with gloo one stream also has a thread (gloo/threads.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from layerzero.watch.events import Event as Event
from layerzero.watch.events import PooledEvent, event_pool, stream_interface


class Waitable(Protocol):
    """Handle of work in flight, such as a collective."""

    def wait(self) -> Event:
        """Order the current stream after the work and its use of buffers; on CPU, block.
        Return an event recorded there after that, if there is one."""


ChainedCollectives = Callable[[Callable[[], None]], None]
"""Runs dependent collectives in order. It receives a callback, and calls it once the first
collective has finished reading its input."""


NOTHING: Any = type("_Nothing", (), dict.fromkeys(("__enter__", "__exit__"), "".format))()
"""A context that runs no Python: `"".format` is of C, takes anything, and returns ""."""


class InlineStream:
    """The stream of a device that has none: work runs at once, in host order."""

    def __enter__(self) -> InlineStream:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def wait(self, event: Event = None) -> None:
        """Nothing to order. The stream is also the handle of its work, which has all run."""

    def record_event(self) -> Event:
        return None

    def enqueue_wait(
        self, pending: Waitable, on_done: Callable[[], None] | None = None
    ) -> Waitable:
        """Return `pending` itself, to be waited for by its user. `on_done` is not called."""
        return pending

    def start_after(self, first: Waitable | None, issue: Callable[[], Waitable]) -> Waitable:
        """Start a collective once `first` and all that is enqueued on this stream are done.
        Blocks the host until then; a stream with a thread does not."""
        if first is not None:
            first.wait()
        return issue()

    def run(self, collectives: ChainedCollectives, input_done: Callable[[], None]) -> Waitable:
        """Run dependent collectives; see `ChainedCollectives`. Blocks the host."""
        collectives(input_done)
        return self

    def drain_handle(self) -> Waitable:
        """Handle for all work queued on the stream so far."""
        return self

    def wait_until_idle(self) -> None:
        """Block the host until a thread of the stream has nothing to do, and forget its work."""


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
        self._context = _entered(stream, module)
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

    def start_after(self, first: Waitable | None, issue: Callable[[], Waitable]) -> Waitable:
        """Start a collective at once: it is queued on its stream after `first`, and the allocator
        reuses memory in stream order anyway."""
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


def _entered(stream: Any, module: Any) -> AbstractContextManager[object]:
    """A context in which the stream is current. It may be used again, but not inside itself."""
    # torch's own streams are contexts themselves, and entered without a call of Python code.
    return stream if hasattr(stream, "__enter__") else module.stream(stream)


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

    def wait(self, stream: Any = None) -> None:
        """`stream`: the current one, where the caller has looked it up."""
        self.event.wait(stream or self.stream.current_stream())


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

    def __init__(self, device: torch.device, reduce: InlineStream | None = None) -> None:
        """`reduce`: on CPU, a stream with a thread; None: without."""
        self._module: Any = None
        self.current: Callable[[], Any] = type(None)
        """The stream on which the program computes now; on CPU None."""
        self.main: Any = None
        """The stream on which the last pass of the model began; packs gradients, owns `.grad`."""
        self.is_capturing: Callable[[], bool] = bool
        """Whether a graph records what is queued on the current stream; on CPU never."""
        self._entered: list[DeviceStream] = []
        self._owners: tuple[DeviceStream, ...] = ()
        if device.type == "cpu":
            self.pre_unshard: CommStream = InlineStream()
            self.unshard: CommStream = InlineStream()
            self.reduce: CommStream = reduce or InlineStream()
            self.offload: CommStream = InlineStream()
        else:
            self._module = stream_interface(device)
            self.current = partial(self._module.current_stream, device.index)
            self.is_capturing = getattr(self._module, "is_current_stream_capturing", bool)
            self._events = event_pool(self._module, device)
            # Compute waits for what these three do, and fills the device meanwhile: at the priority
            # of compute a gather could start only once the kernels queued there leave room.
            self._owners = (
                *(DeviceStream(device, self._entered, is_urgent=True) for _ in range(3)),
                DeviceStream(device, self._entered),
            )
            self.pre_unshard, self.unshard, self.reduce, self.offload = self._owners

    @property
    def are_apart(self) -> bool:
        """Whether memory belongs to the stream that it was allocated on."""
        return self._module is not None

    def join(self) -> None:
        """Order compute after all that is queued on the four; nothing on CPU."""
        for stream in self._owners:
            stream.drain_handle().wait()
            stream.events_before = ()

    def fork(self) -> None:
        """Order the four after compute, which waited for them; a graph of it records them, too."""
        compute = self.record_compute_event()
        for stream in self._owners:
            stream.events_before = ()
            stream.wait(compute)

    def wait_until_idle(self) -> None:
        """Block the host until the thread of a stream has nothing to do; devices have none."""
        if isinstance(self.reduce, InlineStream):
            self.reduce.wait_until_idle()

    def record_compute_event(self, stream: Any = None) -> Event:
        """Record an event on the compute stream, after all work queued there; None on CPU.
        `stream`: the current one, where the caller has looked it up."""
        if self._module is None:
            return None
        return self._events.record(stream or self.current())

    def begin_pass(self) -> None:
        """A forward or backward of the model begins on the current stream."""
        self.main = self.current()

    def on_main(self, used_on: Sequence[Any] | None = None) -> AbstractContextManager[object]:
        """A context in which `main` is current, and comes after what is queued on these streams of
        the program, by default the current one; they come after it in turn. Nothing on CPU."""
        if self._module is None:
            return NOTHING
        current = self.current()
        self.main = current if self.main is None else self.main
        others = [each for each in used_on or [current] if each != self.main]
        return self._on_main(current, others) if others or current != self.main else NOTHING

    @contextmanager
    def _on_main(self, current: Any, others: Sequence[Any]) -> Iterator[None]:
        for each in others:
            self._events.record(each).wait(self.main)
        try:
            with NOTHING if current == self.main else _entered(self.main, self._module):
                yield
        finally:
            for each in others:
                self._events.record(self.main).wait(each)

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
