"""A device with streams, simulated on CPU, that finds accesses which no wait puts in order.

Every operation really runs at once, on CPU, so results are right; beside that, each access of
memory is noted with a vector clock of its stream (simulated_streams.py), and checked
(simulated_memory.py). docs/internals/streams.md says what it models and what it cannot see.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from layerzero.optim.waiting_gradients import WaitingGradient
from tests.harness.internals import (
    GATHERING,
    DeviceStream,
    GradientBuffer,
    HostMemory,
    RuntimeContext,
    Streams,
    Unit,
    Watchdog,
    arguments,
    collectives,
    root,
    watchdog,
)
from tests.harness.recording import observed
from tests.harness.simulated_graphs import Graph
from tests.harness.simulated_memory import _ENGINE, MemoryWatch, Use, allocated_by, place_of
from tests.harness.simulated_streams import Clock, Event, Host, HostStream, Stream

__all__ = ["Event", "HostWait", "SimulatedDevice", "Stream", "simulated_device"]

_ALLOCATES = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")
_COPIES = ("copy_", "_to_copy", "_copy_from", "_foreach_copy_")
_BLOCKS_HOST = (
    *("_local_scalar_dense", "item", "is_nonzero", "equal", "allclose", "linalg_check_errors"),
    # The size of the result depends on the values.
    *("nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive"),
    *("unique_dim_consecutive", "bincount", "argwhere"),
)
_TAKES_TABLE = ("layerzero::pack_",)
"""Read a table of the host that nothing writes; kernels of a device have it there."""
_TAKES_MASK = ("index", "index_put_", "index_put", "_index_put_impl_")


def _tensors_in(value: Any) -> Sequence[Tensor]:
    """Of an operator's arguments or results, which nest in lists alone."""
    if isinstance(value, Tensor):
        return (value,)
    if isinstance(value, (list, tuple)) and value:
        return [tensor for item in value for tensor in _tensors_in(item)]
    return ()


class _Facts(NamedTuple):
    """What the simulation asks of an operator."""

    name: str
    is_view: bool
    arguments: list[tuple[str, bool]]
    """(name, whether it is written to), in order."""


@functools.cache
def _facts_of(func: Any) -> _Facts:
    """Asked once of each operator: a schema answers in C++, and every operation asks."""
    name = func._schema.name.removeprefix("aten::")
    arguments = [
        (argument.name, argument.alias_info is not None and argument.alias_info.is_write)
        for argument in func._schema.arguments
    ]
    return _Facts(name, func.is_view or name == "detach", arguments)


def _used(facts: _Facts, args: Any, kwargs: dict[str, Any]) -> Iterator[tuple[Tensor, bool]]:
    """The tensors that an operator takes, and whether it writes them."""
    for position, (argument, writes) in enumerate(facts.arguments):
        given = args[position] if position < len(args) else kwargs.get(argument)
        for tensor in _tensors_in(given):
            yield tensor, writes


class HostWait(NamedTuple):
    """Something that blocks the host until the device has come to it."""

    what: str
    where: str
    """The engine's function that does it; "" outside the engine."""

    def __str__(self) -> str:
        return f"{self.what} in {self.where or 'code outside the engine'}"


def _engine_function() -> str:
    """The innermost one that is more than a wait for an event."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_ENGINE) and not file.endswith(("comm/streams.py", "watch/events.py")):
            return place_of(frame.f_code)
        frame = frame.f_back
    return ""


class _ThreadState(threading.local):
    """As on CUDA each thread has its own current device, and current stream of each device."""

    def __init__(self, compute: Sequence[Stream]) -> None:
        self.index = 0
        self.streams = [[stream] for stream in compute]


class SimulatedDevice(TorchDispatchMode):
    """Stands in for a device module such as `torch.cuda`, and watches what torch does.

    Attributes:
        index: of the device that all memory is on; the current device is another.
        host_waits: what blocked the host until the device had come to it.
    """

    def __init__(
        self,
        index: int = 1,
        num_streams: int | None = None,
        lag: int = 20,
        on_current_stream: bool = False,
    ) -> None:
        """
        Args:
            on_current_stream: collectives run on the current stream and return no work, as NCCL's
                do unless `asyncOp` is set; else each process group has a stream of its own.
            num_streams: side streams that the device has; `Stream()` hands them out in turns, so
                models may share them. None: each is a new one.
            lag: actions of the host by which the device is behind.
        """
        super().__init__()
        self.index = index
        self.host_waits: list[HostWait] = []
        self.host = Host(lag, self._note_host_wait)
        self.host_stream = HostStream(self.host)
        others = [Stream(self.host, each, f"compute of device {each}") for each in range(index)]
        computes = [*others, Stream(self.host, index, "compute")]
        self.compute = computes[index]
        self.memory = MemoryWatch(self.host_stream)
        self.races = self.memory.races
        """Accesses in no order."""
        self.early_frees = self.memory.early_frees
        """Memory that was freed before the stream that owns it comes after all uses."""
        self._on_current_stream = on_current_stream
        self._thread = _ThreadState(computes)
        self._num_streams = num_streams
        self._handed_out: list[Stream] = []
        self.comms: dict[Any, Stream] = {}
        self._at: list[str] = []
        self._is_paused = False
        self.graph_faults: list[str] = []
        """What a capture or a replay forbids, and was done; each with the engine's function."""
        self.host.on_fault = self._note_fault
        self._graphs: weakref.WeakSet[Graph] = weakref.WeakSet()
        self._capture_stream: Stream | None = None

    @property
    def findings(self) -> list[str]:
        """All races and early frees, in words, each once."""
        return sorted({str(found) for found in (*self.races, *self.early_frees)})

    @property
    def queued_collectives(self) -> Clock:
        """By stream of a process group, how many collectives were queued there."""
        return {comm.id: comm.clock[comm.id] for comm in self.comms.values()}

    def compute_waits_for(self, queued: Clock) -> bool:
        """Whether what is queued on compute next comes after all of these collectives."""
        return all(self.compute.clock.get(comm, 0) >= number for comm, number in queued.items())

    def Stream(self, device: object = None, priority: int = 0) -> Stream:
        index = self._index_of(device)
        number = len(self._handed_out)
        if self._num_streams is not None and number >= self._num_streams:
            stream = self._handed_out[number % self._num_streams]
        else:
            stream = Stream(self.host, index)
        self._handed_out.append(stream)
        return stream

    def Event(self, *args: object, **kwargs: object) -> Event:
        return _RecordedAnywhere(self, bool(kwargs.get("enable_timing")))

    def is_available(self) -> bool:
        """For others than the engine who ask: torch's checkpoint does in builds for a device."""
        return False

    def device_count(self) -> int:
        return len(self._thread.streams)

    def current_device(self) -> int:
        return self._thread.index

    def set_device(self, device: object) -> None:
        self._thread.index = self._index_of(device)

    @contextmanager
    def device(self, device: object) -> Iterator[None]:
        before, self._thread.index = self._thread.index, self._index_of(device)
        try:
            yield
        finally:
            self._thread.index = before

    def current_stream(self, device: object = None) -> Stream:
        return self._thread.streams[self._index_of(device)][-1]

    def stream(self, stream: Stream) -> _Current:
        return _Current(self._thread, stream)

    def is_current_stream_capturing(self) -> bool:
        return self._stream.capture is not None

    def CUDAGraph(self) -> Graph:
        graph = _Graph(self)
        self._graphs.add(graph)
        return graph

    @contextmanager
    def graph(
        self, graph: Graph, pool: object = None, stream: Stream | None = None, **_: object
    ) -> Iterator[None]:
        """As torch's: without a stream, on one of its own."""
        current = self._stream
        if stream is None:
            stream = self._capture_stream = self._capture_stream or self.Stream(self.index)
        self.synchronize()
        stream.tick()  # And so comes after all that the host knows to be done.
        with self.stream(stream):
            graph.begin(stream)
            try:
                yield
            finally:
                with self.paused():
                    graph.end()
        current.wait_stream(stream)  # Nothing has run there.

    def synchronize(self, device: object = None) -> None:
        for stream in (self.compute, *self._handed_out, *self.comms.values()):
            stream.synchronize()

    def _index_of(self, device: object) -> int:
        """Of a device, a number, or the current device; the engine says "cpu" of the model's."""
        if isinstance(device, int):
            return device
        if device is None:
            return self._thread.index
        index = torch.device(device).index
        return self.index if index is None else index

    @contextmanager
    def at(self, unit: str) -> Iterator[None]:
        """Uses inside are told with the unit."""
        self._at.append(unit)
        try:
            yield
        finally:
            self._at.pop()

    def _use(self, what: str, stream: Stream) -> Use:
        return Use(f"{what} [{self._at[-1]}]" if self._at else what, stream.name)

    def _note_host_wait(self, what: str) -> None:
        self.host_waits.append(HostWait(what, _engine_function()))

    def _note_fault(self, what: str) -> None:
        where = _engine_function() or "code outside the engine"
        self.graph_faults.append(f"{what}, in {where}")

    @property
    def _capture(self) -> Graph | None:
        """The graph that records what is queued now."""
        return None if self._is_paused else self.host.capture

    def note_resize(self, storage: torch.UntypedStorage) -> None:
        self.memory.resize(storage, self._stream)
        for each in self._graphs:
            if each is not self.host.capture:
                each.resized_outside(storage)
        if (graph := self._capture) is not None:
            if storage.nbytes():
                self._check_recorded("an allocation")
            with self.paused():
                graph.resize(storage)

    def _check_recorded(self, what: str) -> None:
        if self._stream.capture is None:
            self.host.on_fault(f"{what} on {self._stream.name}, which is not in the capture")

    @property
    def _stream(self) -> Stream:
        """Where operations on the device's memory go: its current stream, whatever the host's
        current device is."""
        return self._thread.streams[self.index][-1]

    def take_for_host(self, tensor: Tensor, is_pinned: bool = True) -> Tensor:
        storage = tensor.untyped_storage()
        memory = self.memory.allocate(storage, self.host_stream, allocated_by("the host"))
        memory.is_pinned = is_pinned
        return tensor

    def is_on_host(self, tensor: Tensor) -> bool:
        return self.memory.is_on_host(tensor)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside is not the device's."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Dynamo compiles nothing here, and torch's guard against it takes as long as `_note`."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_paused:
            return func(*args, **kwargs)
        if WaitingGradient in types:
            return NotImplemented  # It has no memory; what it does with sums comes here.
        facts, graph = _facts_of(func), self._capture
        records = graph is not None and not facts.is_view
        on_host = not facts.is_view and self._runs_on_host(facts, args, kwargs)
        if graph is not None and records and not on_host:
            graph.before(tensor for tensor, writes in _used(facts, args, kwargs) if writes)
        result = func(*args, **kwargs)
        self._note(facts, args, kwargs, result, on_host)
        if graph is not None and records and not on_host:
            self._record(graph, func, facts, args, kwargs, result)
        return result

    def _record(
        self, graph: Graph, func: Any, facts: _Facts, args: Any, kwargs: Any, result: Any
    ) -> None:
        self._check_recorded(facts.name)
        if facts.name in _ALLOCATES:
            graph.allocated(_tensors_in(result))
            return
        if facts.name not in _TAKES_TABLE and any(
            map(self.memory.is_on_host, _tensors_in([*args, *kwargs.values()]))
        ):
            self.host.on_fault(f"a graph repeats a {facts.name} of the host's memory")
        graph.record(facts.name, func, args, kwargs, result)

    def _note(
        self, facts: _Facts, args: Any, kwargs: dict[str, Any], result: Any, on_host: bool
    ) -> None:
        name = facts.name
        if facts.is_view:
            return
        outputs = _tensors_in(result)
        stream = self.host_stream if on_host else self._stream
        if name in _ALLOCATES:
            for output in outputs:
                self.memory.allocate(output.untyped_storage(), stream, allocated_by(name))
            return
        stream.tick()
        use = self._use(name, stream)
        seen = set()
        for tensor, writes in _used(facts, args, kwargs):
            if tensor.dim() or not on_host:
                seen.add(tensor.untyped_storage()._cdata)
                self.memory.access(tensor, stream, use, stream, writes)
        for output in outputs:
            storage = output.untyped_storage()
            if storage._cdata not in seen:
                self.memory.allocate(storage, stream, allocated_by(name))
                self.memory.access(output, stream, use, stream, writes=True)
        if not on_host and self._blocks_host(name, args, kwargs):
            self.host.wait(stream.clock, name)

    def _runs_on_host(self, facts: _Facts, args: Any, kwargs: dict[str, Any]) -> bool:
        """Whether all tensors are the host's; a number that is only read is at home on both."""
        if kwargs.get("device") is not None:
            return False
        found = False
        for tensor, writes in _used(facts, args, kwargs):
            if self.memory.is_on_host(tensor):
                found = True
            elif tensor.dim() or writes:
                return False
        return found

    def _blocks_host(self, name: str, args: Any, kwargs: dict[str, Any]) -> bool:
        if name in _COPIES:
            return self._copy_blocks_host(args, kwargs)
        if name in _TAKES_MASK:
            return any(t.dtype in (torch.bool, torch.uint8) for t in _tensors_in(args[1]))
        if name == "repeat_interleave":
            return kwargs.get("output_size") is None
        return name in _BLOCKS_HOST

    def _copy_blocks_host(self, args: Any, kwargs: dict[str, Any]) -> bool:
        """A copy between host and device does not block if told so, of memory that is pinned."""
        ends = [self.memory.find(tensor) for tensor in _tensors_in(args)]
        hosts = [end for end in ends if end is not None and end.home is self.host_stream]
        if not hosts or len(hosts) == len(ends):
            return False
        is_asked = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
        return not is_asked or not all(end.is_pinned for end in hosts)

    def _is_devices(self, tensor: Tensor) -> bool:
        if self._is_paused or type(tensor) not in (Tensor, torch.nn.Parameter):
            return False
        memory = self.memory.find(tensor)
        return memory is not None and memory.home is not self.host_stream

    def _read_and_wait(self, tensor: Tensor, what: str) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # It keeps nobody waiting, and does not hide what the program has not ordered.
        stream = self._stream
        stream.tick()
        self.memory.access(tensor, stream, self._use(what, stream), stream, writes=False)
        self.host.wait(stream.clock, what)

    def reading(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """`Tensor.tolist`, `numpy` and `cpu`: the values are copied to the host, which waits."""

        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            is_devices = self._is_devices(tensor)
            if is_devices:
                self._read_and_wait(tensor, method.__name__)
            with self.paused():
                found = method(tensor, *args, **kwargs)
                if is_devices and isinstance(found, Tensor):
                    found = self.take_for_host(found.detach().clone(), is_pinned=False)
            return found

        return read

    def making(self, make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """`torch.tensor`: memory of the host's; on a device also a copy, which blocks the host.

        "cpu" as text is the host; as a `torch.device` it is what the engine takes for the device.
        """

        def tensor(*args: Any, **kwargs: Any) -> Tensor:
            made = make(*args, **kwargs)
            device = kwargs.get("device")
            if self._is_paused or type(made) is not Tensor:
                return made
            if device is None or (device == "cpu" and isinstance(device, str)):
                return self.take_for_host(made, is_pinned=False)
            stream = self._stream
            self.memory.allocate(made.untyped_storage(), stream, allocated_by("tensor"))
            self.memory.access(made, stream, self._use("tensor", stream), stream, writes=True)
            self.host.wait(stream.clock, "tensor")
            return made

        return tensor

    def moving(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """`Tensor.to` of the host's memory to a device: a copy there."""

        def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            device = kwargs.get("device", args[0] if args else None)
            if (
                isinstance(device, torch.device)
                and not self._is_paused
                and type(tensor) in (Tensor, torch.nn.Parameter)
                and self.memory.is_on_host(tensor)
            ):
                there = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
                there.copy_(tensor.detach(), non_blocking=bool(kwargs.get("non_blocking")))
                rest = {k: v for k, v in kwargs.items() if k not in ("device", "non_blocking")}
                return method(there, *args[1:], **rest) if args[1:] or rest else there
            return method(tensor, *args, **kwargs)

        return to

    def collective(self, verb: Callable[..., Any], in_place: bool) -> Callable[..., Any]:
        """`verb(output, input, ...)`, or `verb(tensor, ...)`, queued as NCCL does."""

        def queued(*args: Any, **kwargs: Any) -> _Queued | None:
            comm = self._stream if self._on_current_stream else self._comm_of(args, kwargs)
            comm.wait_event(self._stream.record_event())
            comm.tick()
            output, given = args[0], args[0 if in_place else 1]
            use = self._use(verb.__name__, comm)
            for tensor, writes in ((given, False), (output, True)):
                if self.is_on_host(tensor):
                    raise RuntimeError(f"{verb.__name__}: the backend takes no memory of the host")
                self.memory.access(tensor, comm, use, self._stream, writes)
            graph = self._capture
            with self.paused():
                if graph is not None:
                    graph.before([output])
                work = verb(*args, **kwargs)
                if work is not None:
                    work.wait()
                if graph is not None:
                    finish = functools.partial(_finish, verb)
                    graph.record(verb.__name__, finish, args, kwargs, None)
            if self._on_current_stream:
                return None
            return _Queued(self, comm.record_event(), (output, given))

        return queued

    def _comm_of(self, args: Any, kwargs: dict[str, Any]) -> Stream:
        """The stream of the process group: NCCL has a communicator for each."""
        given = (*args, *kwargs.values())
        groups = (getattr(each, "process_group", each) for each in given)
        group = next((each for each in groups if isinstance(each, dist.ProcessGroup)), None)
        ranks = dist.get_process_group_ranks(group)
        name = f"the stream of ranks {' '.join(map(str, ranks))}"
        return self.comms.setdefault(group, Stream(self.host, self.index, name))


class _Graph(Graph):
    """A graph whose replays use memory on the current stream of the device."""

    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__(device.host, self._access, device.memory.is_in_arena)
        self._device = device

    def _access(self, tensors: Iterable[tuple[Tensor, bool]]) -> None:
        device = self._device
        stream = device._stream
        stream.tick()
        use = device._use("a replay", stream)
        for tensor, writes in tensors:
            device.memory.access(tensor, stream, use, stream, writes)

    def replay(self) -> None:
        with self._device.paused(), torch.no_grad():
            super().replay()


def _finish(verb: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    work = verb(*args, **kwargs)
    if work is not None:
        work.wait()


class _Current:
    """A context in which a stream is the current one. As torch's it may be used again, but not
    inside itself."""

    def __init__(self, thread: _ThreadState, stream: Stream) -> None:
        self._thread = thread
        self._stream = stream
        self._before: int | None = None

    def __enter__(self) -> None:
        assert self._before is None, "torch refuses to enter a stream again inside itself"
        self._before, self._thread.index = self._thread.index, self._stream.index
        self._thread.streams[self._stream.index].append(self._stream)

    def __exit__(self, *_: object) -> None:
        assert self._before is not None, "it was entered"
        self._thread.streams[self._stream.index].pop()
        self._thread.index, self._before = self._before, None


class _RecordedAnywhere(Event):
    """Made by itself, as the device module's `Event()`: recorded on the current stream."""

    def __init__(self, device: SimulatedDevice, is_timed: bool) -> None:
        super().__init__(device.host)
        self._device = device
        self._is_timed = is_timed
        self._recorded_s: float | None = None

    def elapsed_time(self, end: _RecordedAnywhere) -> float:
        """Milliseconds between both records, of the host, as operations run at once."""
        if not (self._is_timed and end._is_timed and self.query() and end.query()):
            raise RuntimeError("an event has no time, or the device has not come to it")
        assert self._recorded_s is not None and end._recorded_s is not None, "else query is False"
        return 1e3 * (end._recorded_s - self._recorded_s)

    def record(self, stream: Stream | None = None) -> None:
        self._recorded_s = time.perf_counter()
        super().record(self._device.current_stream() if stream is None else stream)

    def wait(self, stream: Stream | None = None) -> None:
        super().wait(self._device.current_stream() if stream is None else stream)


class _Queued:
    """A collective's handle: waiting orders streams, not the host.

    As NCCL's it keeps the tensors until it is waited for.
    """

    def __init__(self, device: SimulatedDevice, done: Event, tensors: Sequence[Tensor]) -> None:
        self._device = device
        self._done = done
        self._stash = tensors

    def wait(self, timeout: object = None) -> None:
        self._device._stream.wait_event(self._done)
        self._stash = ()

    def is_completed(self) -> bool:
        return self._done.query()


@contextmanager
def simulated_device(**settings: Any) -> Iterator[SimulatedDevice]:
    """Models wrapped and trained inside run as on a device with streams.

    Args:
        settings: of `SimulatedDevice`.
    """
    device = SimulatedDevice(**settings)
    profile = RuntimeContext.profile
    num_models = 0

    def streams(_: torch.device, *args: Any, **kwargs: Any) -> Streams:
        nonlocal num_models
        num_models += 1
        made = Streams(torch.device("cuda", device.index), *args, **kwargs)
        for name, stream in vars(made).items():
            if isinstance(stream, DeviceStream) and stream._stream.name.startswith("side stream"):
                stream._stream.name = name if num_models == 1 else f"{name} of model {num_models}"
        return made

    def on_host(memory: HostMemory, numel: int, dtype: torch.dtype) -> Tensor:
        device.host.refuse_in_capture("memory of the host is allocated")
        return device.take_for_host(torch.zeros(numel, dtype=dtype), memory._pin_memory)

    def name_gradients(buffer: GradientBuffer, leaves: Any, *_: Any, **__: Any) -> None:
        for leaf in leaves:
            if leaf.grad is not None:
                device.memory.name(leaf.grad, "unsharded gradient")

    def throw_away(unit: Unit, *_: Any, **__: Any) -> None:
        """Nobody has waited for what is gathered, as where weights were written since."""
        if unit.state is GATHERING:
            for handle in unit.handles:
                device.memory.throw_away(handle.main_shard, unit.label)

    @contextmanager
    def noted_profile(context: RuntimeContext, action: str, unit: str) -> Iterator[None]:
        with profile(context, action, unit), device.at(unit):
            yield

    def refused(owner: Any, name: str, what: str) -> Any:
        """Calls of a method inside a capture are faults."""
        return observed(owner, name, lambda *_: device.host.refuse_in_capture(what))

    def queued(module: Any, name: str, in_place: bool = False) -> Any:
        verb = device.collective(getattr(module, name), in_place)
        return mock.patch.object(module, name, verb)

    reading = {name: device.reading(getattr(Tensor, name)) for name in ("tolist", "numpy", "cpu")}
    with (
        mock.patch.object(torch, "get_device_module", lambda _: device),
        observed(torch.UntypedStorage, "resize_", after=lambda *call: device.note_resize(call[1])),
        mock.patch.object(root, "Streams", streams),
        mock.patch.object(arguments, "has_separate_memory", lambda _: True),
        mock.patch.object(HostMemory, "empty", on_host),
        observed(GradientBuffer, "collect", name_gradients),
        observed(Unit, "reshard", throw_away),
        mock.patch.object(RuntimeContext, "profile", noted_profile),
        refused(Streams, "events_before", "the watchdog watches a collective"),
        refused(Watchdog, "_compare_with_next_rank", "a rank writes to the store"),
        refused(watchdog, "_published", "a rank reads from the store"),
        mock.patch.object(torch, "tensor", device.making(torch.tensor)),
        mock.patch.multiple(Tensor, to=device.moving(Tensor.to), **reading),
        queued(collectives, "_issue_all_gather"),
        queued(collectives, "_issue_reduce_scatter"),
        queued(dist, "all_to_all_single"),
        queued(dist, "broadcast", in_place=True),
        device,
    ):
        yield device
