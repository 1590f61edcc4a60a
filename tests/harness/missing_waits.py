"""Waits of the engine taken away, one at a time, and memory or streams that are the wrong ones.

`defect` returns a context in which the engine has the one of a name: of a function here, or of a
table. test_missing_waits.py trains with each on the simulated device, tests/gpu on a real one.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from torch import Tensor

from tests.harness.internals import (
    DeviceStream,
    EventPool,
    FlatParamHandle,
    GradientReducer,
    Pending,
    Reduction,
    RuntimeContext,
    Streams,
    Unit,
    UnshardScheduler,
    _OnStream,
)
from tests.harness.recording import observed


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
    return observed(Streams, "__init__", after=lambda _, streams, device: change(streams))


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


def without_compute_waiting_for_whole_parameters() -> AbstractContextManager[object]:
    """A compute shard that is the full buffer is cast on another stream, with no gather after."""

    class Done:
        def wait(self, *stream: object) -> None: ...

    return mock.patch.object(DeviceStream, "drain_handle", lambda _: Done())


def with_the_current_device() -> AbstractContextManager[object]:
    """Not the model's: the stream of another device, where nothing is queued.

    Its events are apart from the model's, which would be refused there whenever one is free.
    """
    new = {"_events": EventPool()}
    return _with_stream(lambda each: vars(each).update(new, current=each._module.current_stream))


def with_waits_of_the_current_device() -> AbstractContextManager[object]:
    def wait(pending: _OnStream, stream: Any = None) -> None:
        pending.event.wait(pending.stream._module.current_stream())

    return mock.patch.object(_OnStream, "wait", wait)


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


def without_the_event_of_offloaded_chunks() -> AbstractContextManager[object]:
    def deaf(method: Callable[..., Any]) -> Callable[..., Any]:
        def run(reduction: Reduction, chunk: Tensor, stream: DeviceStream) -> Any:
            return method(reduction, chunk, mock.Mock(wraps=stream, wait=lambda _: None))

        return run

    names = ("_add_up_on_host", "_download")
    return mock.patch.multiple(
        Reduction, **{name: deaf(getattr(Reduction, name)) for name in names}
    )


_WAYS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "without_compute_waiting_for_reductions": lambda: _completing(waits=False),
    "freeing_gradients_before_they_are_reduced": lambda: _completing(waits=True),
}


def defect(name: str) -> AbstractContextManager[object]:
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
