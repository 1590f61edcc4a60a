"""Waits of the engine taken away, one at a time, and memory or streams that are the wrong ones.

`defect` returns a context in which the engine has the one of a name: of a function here, or of a
table. test_missing_waits.py trains with each on the simulated device, tests/gpu on a real one.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from layerzero import ops
from layerzero.comm.pending import Pending
from layerzero.comm.streams import DeviceStream, Streams, _OnStream
from layerzero.flat import flat_param
from layerzero.flat.gradient_sums import GradientSums
from layerzero.flat.gradients import GradientBuffer
from layerzero.flat.host_memory import HostMemory
from layerzero.step.context import RuntimeContext
from layerzero.step.handle import FlatParamHandle
from layerzero.step.reducer import GradientReducer
from layerzero.step.reduction import Reduction
from layerzero.step.scheduler import UnshardScheduler
from layerzero.step.unit import Unit
from layerzero.watch.events import EventPool

_DEVICE = torch.device("cuda")


class _Never:
    """An attribute that cannot be set: the event is always None, for nothing to wait for."""

    def __get__(self, *_: object) -> None:
        return None

    def __set__(self, *_: object) -> None: ...


_IDLE: dict[str, tuple[type, str]] = {
    "without_waiting_for_marks": (DeviceStream, "wait"),
    "without_waiting_for_gathers": (_OnStream, "wait"),
    "without_compute_waiting_for_unsharded_parameters": (FlatParamHandle, "wait_for_unshard"),
    "without_waiting_before_frees": (RuntimeContext, "before_free"),
    "without_memory_of_compute_for_chunks": (Reduction, "_allocate_chunk"),
    "without_the_host_waiting": (Streams, "wait_on_host"),
}
"""Defect -> the method that does nothing."""
_EVENTS: dict[str, tuple[type, str]] = {
    "without_the_event_of_weights": (RuntimeContext, "weights_written"),
    "without_the_event_of_uploads": (RuntimeContext, "shard_uploaded"),
    "without_the_event_of_landed_gradients": (Reduction, "landed"),
}
"""Defect -> the attribute that never has an event."""


def idle(owner: Any, method: str) -> AbstractContextManager[object]:
    return mock.patch.object(owner, method, lambda *_: None)


def _with_stream(change: Callable[[Streams], None]) -> AbstractContextManager[object]:
    original = Streams.__init__

    def changed(streams: Streams, device: torch.device) -> None:
        original(streams, device)
        change(streams)

    return mock.patch.object(Streams, "__init__", changed)


_DEAF_STREAMS = {
    "without_the_cast_waiting": "pre_unshard",
    "without_the_unshard_stream_waiting": "unshard",
    "without_the_event_of_collected_gradients": "reduce",
    "without_waiting_on_the_offload_stream": "offload",
}
"""Defect -> the stream that never waits for an event."""


_VERBS = {
    "without_waiting_for_the_gather": "all-gather",
    "without_waiting_for_the_outer_gather": "outer all-gather",
    "without_waiting_for_the_first_hop": "reduce-scatter",
    "without_waiting_for_the_second_hop": "outer reduce-scatter",
    "without_waiting_for_gradient_presence": "gradient presence",
    "without_waiting_for_gradients_to_owners": "gradients to owners",
    "without_waiting_for_values_from_owners": "values from owners",
    "without_waiting_for_values_to_owners": "values to owners",
}
"""Defect -> the collective for whose end nobody waits before its result is used on the stream that
started it."""


def _without_waiting_for(verb: str) -> AbstractContextManager[object]:
    original = Pending.wait_for_data

    def skipping(pending: Pending) -> None:
        if pending.operation.verb == verb:
            pending.works = ()
        else:
            original(pending)

    return mock.patch.object(Pending, "wait_for_data", skipping)


def without_the_streams_event() -> AbstractContextManager[object]:
    """The stream is never ordered after the collective."""

    def enqueue_wait(
        stream: DeviceStream, pending: Any, on_done: Callable[[], None] | None = None
    ) -> Any:
        return _OnStream(stream, stream.record_event(), pending)

    return mock.patch.object(DeviceStream, "enqueue_wait", enqueue_wait)


def without_a_new_event_of_weights() -> AbstractContextManager[object]:
    """Recorded in the first forward alone."""
    original = RuntimeContext.note_weights

    def note_weights(context: RuntimeContext) -> None:
        if context.weights_written is None:
            original(context)

    return mock.patch.object(RuntimeContext, "note_weights", note_weights)


def without_the_event_of_the_cast() -> AbstractContextManager[object]:
    return _with_stream(lambda streams: setattr(streams.pre_unshard, "record_event", lambda: None))


def without_waiting_when_a_step_ends() -> AbstractContextManager[object]:
    """Compute shards are freed while gathers read them."""
    end_step = UnshardScheduler.end_step

    def ending(scheduler: UnshardScheduler) -> None:
        with idle(scheduler._context.streams.pre_unshard, "wait"):
            end_step(scheduler)

    return mock.patch.object(UnshardScheduler, "end_step", ending)


def without_waiting_for_unused_gathers() -> AbstractContextManager[object]:
    """`reshard` frees what is still being gathered."""
    reshard, wait = Unit.reshard, Unit.wait_for_unshard
    is_resharding = False

    def resharding(unit: Unit, *args: Any, **kwargs: Any) -> None:
        nonlocal is_resharding
        is_resharding = True
        try:
            reshard(unit, *args, **kwargs)
        finally:
            is_resharding = False

    def waiting(unit: Unit) -> None:
        if not is_resharding:
            wait(unit)
        else:
            with idle(FlatParamHandle, "wait_for_unshard"):
                wait(unit)

    return mock.patch.multiple(Unit, reshard=resharding, wait_for_unshard=waiting)


@contextmanager
def waiting_at_the_next_gather_only() -> Iterator[None]:
    """Enough for memory that stays in its stream's pool."""
    gather = FlatParamHandle._gather

    def waits_first(handle: FlatParamHandle, context: RuntimeContext, *args: Any) -> Any:
        context.streams.unshard.wait(context.streams.record_compute_event())
        return gather(handle, context, *args)

    with (
        idle(RuntimeContext, "before_free"),
        mock.patch.object(FlatParamHandle, "_gather", waits_first),
    ):
        yield


def waiting_after_the_free() -> AbstractContextManager[object]:
    """The stream that owns full buffers waits when they are in its pool already."""
    before, reshard = RuntimeContext.before_free, Unit.reshard

    def resharding(unit: Unit, *args: Any, **kwargs: Any) -> None:
        with idle(RuntimeContext, "before_free"):
            reshard(unit, *args, **kwargs)
        before(unit.context)

    return mock.patch.object(Unit, "reshard", resharding)


def with_full_buffers_of_the_first_user() -> AbstractContextManager[object]:
    """Allocated before the unshard stream is entered: memory of compute."""
    allocate = FlatParamHandle.allocate_full

    def allocated(handle: FlatParamHandle) -> None:
        device = torch.get_device_module(_DEVICE)
        with device.stream(device.default_stream(_DEVICE)):
            allocate(handle)

    return mock.patch.object(FlatParamHandle, "allocate_full", allocated)


def without_compute_waiting_for_whole_parameters() -> AbstractContextManager[object]:
    """A compute shard that is the full buffer is cast on another stream, with no gather after."""

    class Done:
        def wait(self) -> None: ...

    return mock.patch.object(DeviceStream, "drain_handle", lambda _: Done())


def with_the_current_device() -> AbstractContextManager[object]:
    """Not the model's: the stream of another device, where nothing is queued."""

    def record_compute_event(streams: Streams) -> object:
        return streams._module.current_stream().record_event()

    return mock.patch.object(Streams, "record_compute_event", record_compute_event)


def with_waits_of_the_current_device() -> AbstractContextManager[object]:
    def current_stream(stream: DeviceStream) -> Any:
        return stream._module.current_stream()

    return mock.patch.object(DeviceStream, "current_stream", current_stream)


def _completing(waits: bool) -> AbstractContextManager[object]:
    """Compute takes what was reduced without a wait, or frees what is reduced before its wait."""
    complete = GradientReducer._complete_oldest

    def completing(reducer: GradientReducer) -> None:
        pending = reducer._in_flight[0].pending
        with idle(_OnStream, "wait"):
            complete(reducer)
        if waits and pending is not None:
            pending.wait()

    return mock.patch.object(GradientReducer, "_complete_oldest", completing)


@contextmanager
def _collecting_on_reduce(waits: bool) -> Iterator[None]:
    """Gradients are copied into the buffer on the reduce stream: more overlap."""
    start, collect = Reduction.start, GradientBuffer.collect
    current: list[RuntimeContext] = []

    def starting(reduction: Reduction, in_shards: bool) -> None:
        current.append(reduction._context)
        try:
            start(reduction, in_shards)
        finally:
            current.pop()

    def collecting(buffer: GradientBuffer, *args: Any, **kwargs: Any) -> None:
        if not current:
            return collect(buffer, *args, **kwargs)
        streams = current[-1].streams
        compute = streams.record_compute_event()
        with streams.reduce as stream:
            if waits:
                stream.wait(compute)
            return collect(buffer, *args, **kwargs)

    with (
        mock.patch.object(Reduction, "start", starting),
        mock.patch.object(GradientBuffer, "collect", collecting),
    ):
        yield


def with_one_event_for_all() -> AbstractContextManager[object]:
    """As a pool would that gives an event to a second user while the first needs it."""
    events: list[Any] = []

    def record(_: EventPool, stream: Any) -> Any:
        if not events:
            events.append(stream.record_event())
        return stream.record_event(events[0])

    return mock.patch.object(EventPool, "record", record)


def asking_instead_of_waiting() -> AbstractContextManager[object]:
    """The host asks whether the event has happened, and goes on whatever the answer."""

    def asks(_: Streams, event: Any) -> None:
        if event is not None:
            event.query()

    return mock.patch.object(Streams, "wait_on_host", asks)


def without_the_event_of_offloaded_chunks() -> AbstractContextManager[object]:
    def deaf(method: Callable[..., Any]) -> Callable[..., Any]:
        def run(reduction: Reduction, chunk: Tensor, stream: DeviceStream) -> Any:
            return method(reduction, chunk, mock.Mock(wraps=stream, wait=lambda _: None))

        return run

    names = ("_add_up_on_host", "_download")
    return mock.patch.multiple(
        Reduction, **{name: deaf(getattr(Reduction, name)) for name in names}
    )


@contextmanager
def _staging_on_compute(owner: type, name: str) -> Iterator[None]:
    """What an upload is staged in is memory of compute."""
    original, empty_like = getattr(owner, name), torch.empty_like

    def allocated(*args: Any, **kwargs: Any) -> Tensor:
        device = torch.get_device_module(_DEVICE)
        with device.stream(device.default_stream(_DEVICE)):
            return empty_like(*args, **kwargs)

    def staging(*args: Any, **kwargs: Any) -> Any:
        with mock.patch.object(torch, "empty_like", allocated):
            return original(*args, **kwargs)

    with mock.patch.object(owner, name, staging):
        yield


def at_each_reduction(block: Callable[[Tensor, Unit], object]) -> AbstractContextManager[object]:
    """`block(a tensor of the device, the unit)`."""
    reduce = GradientReducer.reduce

    def reducing(reducer: GradientReducer, unit: Unit) -> None:
        reduce(reducer, unit)
        block(unit.handles[0].full.data.new_ones(3), unit)

    return mock.patch.object(GradientReducer, "reduce", reducing)


def _copies_to_pageable_memory(tensor: Tensor, _: Unit) -> None:
    host = HostMemory(False, _DEVICE).empty(tensor.numel(), tensor.dtype)
    host.copy_(tensor, non_blocking=True)


BLOCKS: dict[str, Callable[[Tensor, Unit], object]] = {
    "reading_a_list": lambda tensor, _: tensor.tolist(),
    "reading_a_number": lambda tensor, _: tensor[0].item(),
    "branching_on_a_tensor": lambda tensor, _: bool(tensor.isnan().any()),
    "reading_into_numpy": lambda tensor, _: tensor.detach().numpy(),
    "bringing_to_the_cpu": lambda tensor, _: tensor.cpu(),
    "choosing_by_values": lambda tensor, _: tensor.nonzero(),
    "choosing_by_a_mask": lambda tensor, _: tensor[tensor > 0],
    "comparing_tensors": lambda tensor, _: torch.equal(tensor, tensor),
    "sending_a_list_to_the_device": lambda tensor, _: torch.tensor([1.0], device=tensor.device),
    "copying_to_pageable_memory": _copies_to_pageable_memory,
    "copying_and_waiting": lambda tensor, _: tensor.copy_(
        HostMemory(True, _DEVICE).empty(tensor.numel(), tensor.dtype)
    ),
    "waiting_for_an_event": lambda _, unit: (
        unit.context.streams.record_compute_event().synchronize()
    ),
    "waiting_for_the_device": lambda *_: torch.get_device_module(_DEVICE).synchronize(),
}
"""Defect -> what blocks the host at each reduction."""


def packing_by_a_table_on_the_device() -> AbstractContextManager[object]:
    """What an install without kernels for the device would do."""
    pack = ops.pack_

    def packing(out: Tensor, srcs: Any, segs: Any, *args: Any, **kwargs: Any) -> Any:
        torch.zeros(3, dtype=torch.int64, device=out.device).tolist()
        return pack(out, srcs, segs, *args, **kwargs)

    return mock.patch("layerzero.flat.gradients.pack_", packing)


_WAYS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "without_compute_waiting_for_reductions": lambda: _completing(waits=False),
    "freeing_gradients_before_they_are_reduced": lambda: _completing(waits=True),
    "collecting_on_reduce_at_once": lambda: _collecting_on_reduce(waits=False),
    # Gradients of compute are freed while the reduce stream reads them.
    "collecting_on_reduce_after_a_wait": lambda: _collecting_on_reduce(waits=True),
    "staging_shards_on_compute": lambda: _staging_on_compute(
        flat_param.FlatParam, "write_compute_slice"
    ),
    "staging_sums_on_compute": lambda: _staging_on_compute(GradientSums, "add_host_sum_to"),
}


def defect(name: str) -> AbstractContextManager[object]:
    if name in BLOCKS:
        return at_each_reduction(BLOCKS[name])
    if name in _VERBS:
        return _without_waiting_for(_VERBS[name])
    if name in _DEAF_STREAMS:
        stream = _DEAF_STREAMS[name]
        return _with_stream(lambda own: setattr(getattr(own, stream), "wait", lambda _: None))
    if name in _IDLE:
        return idle(*_IDLE[name])
    if name in _EVENTS:
        return mock.patch.object(*_EVENTS[name], _Never(), create=True)
    made: AbstractContextManager[object] = (_WAYS.get(name) or globals()[name])()
    return made
