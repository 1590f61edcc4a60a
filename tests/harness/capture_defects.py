"""Defects of captures and replays, one at a time; test_graph_capture.py finds each.

`defect` returns a context in which the engine, or `capture`, has the one of a name: of a function
here, or of what blocks the host.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from layerzero import graph_capture
from layerzero.comm.streams import Streams
from layerzero.flat.host_memory import HostMemory
from layerzero.graph_capture import CapturedStep, Recording
from layerzero.step.operations import Operations
from layerzero.step.reducer import GradientReducer
from layerzero.step.unit import Unit
from layerzero.watch.watchdog import Watchdog
from tests.harness.missing_waits import idle
from tests.harness.simulated_streams import Stream

_Context = AbstractContextManager[object]
_CPU = torch.device("cpu")


def at_each_reduction(block: Callable[[Tensor, Unit], object]) -> _Context:
    """`block(a tensor of the device, the unit)`."""
    reduce = GradientReducer.reduce

    def reducing(reducer: GradientReducer, unit: Unit) -> None:
        reduce(reducer, unit)
        block(unit.handles[0].full.data.new_ones(3), unit)

    return mock.patch.object(GradientReducer, "reduce", reducing)


_BLOCKS: dict[str, Callable[[Tensor, Unit], object]] = {
    "waiting_for_an_event": lambda _, unit: (
        unit.context.streams.record_compute_event().synchronize()
    ),
    "waiting_for_the_device": lambda *_: torch.get_device_module("cuda").synchronize(),
    "reading_a_number": lambda tensor, _: tensor[0].item(),
    "branching_on_a_tensor": lambda tensor, _: bool(tensor.isnan().any()),
    "choosing_by_values": lambda tensor, _: tensor.nonzero(),
    "sending_a_list_to_the_device": lambda tensor, _: torch.tensor([1.0], device=tensor.device),
}
"""Defect -> what blocks the host at each reduction."""


def _unless_called_by(name: str, owner: type, method: str) -> _Context:
    """The method does nothing where a function of this name calls it."""
    original: Callable[..., Any] = getattr(owner, method)

    def calling(*args: Any) -> Any:
        if sys._getframe(1).f_code.co_name != name:
            return original(*args)
        return None

    return mock.patch.object(owner, method, calling)


def watching_what_is_recorded() -> _Context:
    watched = property(lambda _: True, lambda *_: None)
    return mock.patch.object(Operations, "is_watched", watched)


def without_side_streams_in_the_capture() -> _Context:
    return _unless_called_by("_begin", Streams, "fork")


@contextmanager
def without_joining_side_streams() -> Iterator[None]:
    """And with work on one of them that compute waits for nowhere else."""

    def work(tensor: Tensor, unit: Unit) -> None:
        with unit.context.streams.offload:
            tensor.add_(1)

    with mock.patch.object(Streams, "join", lambda _: None), at_each_reduction(work):
        yield


def asking_for_an_event() -> _Context:
    def ask(_: Tensor, unit: Unit) -> None:
        event = unit.context.streams.record_compute_event()
        assert event is not None, "the device has streams"
        event.query()

    return at_each_reduction(ask)


def allocating_memory_of_the_host() -> _Context:
    return at_each_reduction(lambda *_: HostMemory(True, _CPU).empty(3, torch.float32))


_pinned: list[Tensor] = []


def copying_from_the_host() -> _Context:
    """The memory is there before; what the host writes there meanwhile is sent as well."""

    def copy(tensor: Tensor, unit: Unit) -> None:
        if not unit.context.streams.is_capturing():
            _pinned[:] = [HostMemory(True, _CPU).empty(3, tensor.dtype)]
        tensor.copy_(_pinned[0], non_blocking=True)

    return at_each_reduction(copy)


def writing_to_the_store() -> _Context:
    dog, store = mock.MagicMock(_count=0, _digest=0, _history={}), mock.MagicMock()
    store.check.return_value = False
    return at_each_reduction(lambda *_: Watchdog._differing_pair(dog, store))


def keeping_events_for_the_watchdog() -> _Context:
    """Streams come after events of the capture, as far as a watchdog is told."""

    def join(streams: Streams) -> None:
        for stream in streams._owners:
            stream.drain_handle().wait()

    def fork(streams: Streams) -> None:
        for stream in streams._owners:
            stream.wait(streams.record_compute_event())

    return mock.patch.multiple(Streams, join=join, fork=fork)


def without_the_inputs() -> _Context:
    replay = CapturedStep._replay
    return mock.patch.object(CapturedStep, "_replay", lambda own, _: replay(own, own._inputs))


def without_copies_of_outputs() -> _Context:
    return mock.patch.object(graph_capture, "_copies", lambda outputs: outputs)


def without_the_factor_of_clipping() -> _Context:

    def get(of: object, name: str, default: Any) -> Any:
        return default if name == "next_factor" else getattr(of, name, default)

    return mock.patch.object(graph_capture, "getattr", get, create=True)


def replaying_in_every_state() -> _Context:
    return mock.patch.object(CapturedStep, "_state", lambda _: {})


def without_order_after_graphs() -> _Context:
    original = Recording._begin

    def begin(recording: Recording, unit: Unit | None = None) -> None:
        if recording._root.streams.is_capturing():
            original(recording, unit)

    return mock.patch.object(Recording, "_begin", begin)


def dropping_tables() -> _Context:
    """They go with the recording."""
    nothing = property(lambda _: {}, lambda *_: None)
    return mock.patch.object(Recording, "_tables", nothing, create=True)


_IDLE: dict[str, tuple[Any, str]] = {
    "without_waiting_for_the_current_stream": (Stream, "wait_stream"),
    "without_gradients": (CapturedStep, "_leave"),
    # They are not where the next step finds them.
    "leaving_gradients_in_the_pool": (torch, "_foreach_copy_"),
    "without_growing_versions": (torch.autograd.graph, "increment_version"),
    "with_the_optimizer_in_the_graph": (CapturedStep, "_before_step"),
}
"""Defect -> the function that does nothing."""


def defect(name: str) -> _Context:
    if name in _IDLE:
        return idle(*_IDLE[name])
    made: _Context = at_each_reduction(_BLOCKS[name]) if name in _BLOCKS else globals()[name]()
    return made
