"""A device with streams, simulated on CPU, that finds accesses which no wait puts in order.

The engine runs its code for devices: streams are side streams, collectives are queued, the host
does not wait. Every operation really runs at once, on CPU, so results are right; beside that, each
access of memory is noted with a vector clock of its stream, and two accesses of the same bytes, one
of them a write, must be ordered by events. As on a device, memory that was freed may be handed out
again at once on the stream it was allocated on: what is written there must come after every use
that the old contents had on any stream. (Vector clocks as in Mattern, Virtual Time and Global
States of Distributed Systems, 1989.)

The host is in the picture too. Memory that `HostMemory` gave out, and what is computed from it, is
the host's; operations on it alone run on the host at once, and must come after every access that a
stream has of it, by `Event.synchronize`. What the host did before it queued something is done.

What it cannot tell: how fast anything is, and whether a real device does what it is believed to.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from layerzero.comm import collectives
from layerzero.comm.streams import Streams
from layerzero.construct import unit_arguments
from layerzero.core.host import HostMemory
from layerzero.runtime import root

Clock = dict[int, int]
"""Stream -> how many of its actions are known to have happened."""

_ALLOCATES = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")
_FREED = ", in memory freed since"
_expired = torch.UntypedStorage._expired
_BLOCKS_HOST = ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal")


def _tensors_in(value: Any) -> Sequence[Tensor]:
    """Of an operator's arguments or results, which nest in lists alone."""
    if isinstance(value, Tensor):
        return (value,)
    if isinstance(value, (list, tuple)) and value:
        return [tensor for item in value for tensor in _tensors_in(item)]
    return ()


@functools.cache
def _facts_of(func: Any) -> _Facts:
    """Asked once of each operator: a schema answers in C++, and every operation asks."""
    name = func._schema.name.removeprefix("aten::")
    arguments = [
        (argument.name, argument.alias_info is not None and argument.alias_info.is_write)
        for argument in func._schema.arguments
    ]
    return _Facts(name, func.is_view or name == "detach", arguments)


class _Facts(NamedTuple):
    """What the simulation asks of an operator."""

    name: str
    is_view: bool
    arguments: list[tuple[str, bool]]
    """(name, whether it is written to), in order."""


def _merge(clock: Clock, other: Clock) -> None:
    for stream, time in other.items():
        clock[stream] = max(clock.get(stream, 0), time)


class Event:
    def __init__(self, clock: Clock, host: Clock) -> None:
        self.clock = clock
        self._host = host

    def record(self, stream: Stream) -> None:
        """Another place from now on; who waited already, waited for the one before."""
        self.clock = dict(stream.clock)

    def wait(self, stream: Stream) -> None:
        stream.wait_event(self)

    def synchronize(self) -> None:
        """The host waits."""
        _merge(self._host, self.clock)

    def query(self) -> bool:
        return True


class Stream:
    """A queue of the device; what it has waited for is in its clock."""

    _ids = itertools.count()

    def __init__(self, host: Stream | None = None, name: str = "") -> None:
        self.id = next(Stream._ids)
        self.name = name or f"side stream {self.id}"
        self.clock: Clock = {self.id: 0}
        self._host = host or self

    def tick(self) -> None:
        """One more action, queued by the host after all it did."""
        _merge(self.clock, self._host.clock)
        self.clock[self.id] += 1

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event({}, self._host.clock)
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        _merge(self.clock, event.clock)


@dataclass
class _Memory:
    """Accesses of one storage since it was allocated."""

    alive: StorageWeakRef
    home: Stream
    """The stream it was allocated on, whose allocations may get its memory next."""
    written: Clock
    read: Clock
    last: dict[int, str] = field(default_factory=dict)
    """Stream -> what it did here last, for the report."""

    def is_gone(self) -> bool:
        return _expired(self.alive.cdata)


class SimulatedDevice(TorchDispatchMode):
    """Stands in for a device module such as `torch.cuda`, and watches what torch does."""

    races: list[str]
    """Accesses in no order, in words."""
    early_frees: list[str]
    """Memory that was freed before the stream that owns it comes after all uses, in words. It
    could leave the pool of that stream (`empty_cache`, a retry after out of memory)."""
    host_waits: list[str]
    """Operations that block the host until the device has come to them."""

    def __init__(self) -> None:
        super().__init__()
        self.races = []
        self.early_frees = []
        self.host_waits = []
        self._host = Stream(name="the host")
        self._compute = Stream(self._host, "compute")
        self._comms: dict[Any, Stream] = {}
        """By process group, as NCCL has a communicator for each."""
        self._elsewhere = Stream(self._host, "the compute stream of another device")
        self._current = [self._compute]
        self._memories: dict[int, _Memory] = {}
        self._alive: dict[int, int] = {}  # the same keys -> `_Memory.alive.cdata`
        self._freed: dict[int, Clock] = {}
        self._freed_last: dict[int, dict[int, str]] = {}
        self._is_paused = False

    @property
    def queued_collectives(self) -> Clock:
        """By stream of a process group, how many collectives were queued there."""
        return {comm.id: comm.clock[comm.id] for comm in self._comms.values()}

    def compute_waits_for(self, queued: Clock) -> bool:
        """Whether what is queued on compute next comes after all of these collectives."""
        return all(self._compute.clock.get(comm, 0) >= number for comm, number in queued.items())

    # The device module -----------------------------------------------------------------------

    def Stream(self, device: object = None) -> Stream:
        return Stream(self._host)

    def is_available(self) -> bool:
        """For others than the engine who ask: torch's checkpoint does in builds for a device."""
        return False

    def set_device(self, device: object) -> None:
        """Of the thread; here no device but the model's is simulated."""

    def current_stream(self, device: object = None) -> Stream:
        """Of the model's device; without one of the current device, which is another."""
        return self._elsewhere if device is None else self._current[-1]

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self._current.append(stream)
        try:
            yield
        finally:
            self._current.pop()

    # Memory ----------------------------------------------------------------------------------

    def take_for_host(self, tensor: Tensor) -> Tensor:
        """Event memory as the host's, whose allocator waits for copies before it gives it out."""
        storage = tensor.untyped_storage()
        self._remember(storage, self._host, {}, {})
        return tensor

    def _remember(
        self, storage: torch.UntypedStorage, home: Stream, before: Clock, last: dict[int, str]
    ) -> _Memory:
        memory = _Memory(StorageWeakRef(storage), home, before, {}, last)
        self._memories[storage._cdata] = memory
        self._alive[storage._cdata] = memory.alive.cdata
        return memory

    def _is_on_host(self, tensor: Tensor) -> bool:
        memory = self._memories.get(tensor.untyped_storage()._cdata)
        return memory is not None and not memory.is_gone() and memory.home is self._host

    def _allocate(self, storage: torch.UntypedStorage) -> _Memory:
        """Memory from the pool of the current stream."""
        # As `is_gone()`, without its call: every allocation asks all memories.
        gone = [key for key, weak in self._alive.items() if _expired(weak)]
        for key in gone:
            self._free(key)
        home = self._current[-1]
        before = dict(self._freed.get(home.id, {}))
        last = dict(self._freed_last.get(home.id, {}))
        return self._remember(storage, home, before, last)

    def _free(self, key: int) -> None:
        memory = self._memories.pop(key)
        del self._alive[key]
        if memory.home is self._host:
            return
        for stream, time in (*memory.written.items(), *memory.read.items()):
            if memory.home.clock.get(stream, 0) < time:
                self.early_frees.append(
                    f"memory of {memory.home.name} is freed before it waits for "
                    f"{memory.last.get(stream, 'an earlier operation')}"
                )
        pool = self._freed.setdefault(memory.home.id, {})
        _merge(pool, memory.written)
        _merge(pool, memory.read)
        self._freed_last.setdefault(memory.home.id, {}).update(
            {stream: f"{what.removesuffix(_FREED)}{_FREED}" for stream, what in memory.last.items()}
        )

    def _resize(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        if storage._cdata in self._memories:
            self._free(storage._cdata)
        if nbytes:
            self._allocate(storage)

    def _access(self, tensor: Tensor, stream: Stream, what: str, writes: bool) -> None:
        storage = tensor.untyped_storage()
        if not storage.nbytes() or not tensor.numel():
            return
        memory = self._memories.get(storage._cdata)
        if memory is None or memory.is_gone():
            memory = self._allocate(storage)
        self._require(memory.written, memory, stream, what)
        if writes:
            self._require(memory.read, memory, stream, what)
            memory.written[stream.id] = stream.clock[stream.id]
        else:
            memory.read[stream.id] = stream.clock[stream.id]
        memory.last[stream.id] = f"{what} on {stream.name}"

    def _require(self, before: Clock, memory: _Memory, stream: Stream, what: str) -> None:
        for other, time in before.items():
            if stream.clock.get(other, 0) < time:
                self.races.append(
                    f"{what} on {stream.name} does not wait for what was used by "
                    f"{memory.last.get(other, 'an earlier operation')}"
                )

    # What torch does -------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self._is_paused:
            self._note(_facts_of(func), args, kwargs, result)
        return result

    def _note(self, facts: _Facts, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        name = facts.name
        outputs = _tensors_in(result)
        on_host = self._runs_on_host(args, kwargs)
        if name in _ALLOCATES:
            for output in outputs:
                if on_host:
                    self.take_for_host(output)
                else:
                    self._allocate(output.untyped_storage())
            return
        if name in _BLOCKS_HOST:
            self.host_waits.append(name)
        if facts.is_view:
            return
        stream = self._host if on_host else self._current[-1]
        stream.tick()
        seen = set()
        for position, (argument, writes) in enumerate(facts.arguments):
            given = args[position] if position < len(args) else kwargs.get(argument)
            for tensor in _tensors_in(given):
                if tensor.dim() or not on_host:
                    seen.add(tensor.untyped_storage()._cdata)
                    self._access(tensor, stream, name, writes)
        for output in outputs:
            storage = output.untyped_storage()
            if storage._cdata not in seen:
                if on_host:
                    self.take_for_host(output)
                else:
                    self._allocate(storage)
                self._access(output, stream, name, writes=True)

    def _runs_on_host(self, args: Any, kwargs: dict[str, Any]) -> bool:
        """Whether all tensors are the host's; a scalar is at home on both sides."""
        if kwargs.get("device") is not None:
            return False
        found = False
        for given in (args, tuple(kwargs.values())):
            for tensor in _tensors_in(given):
                if tensor.dim():
                    if not self._is_on_host(tensor):
                        return False
                    found = True
        return found

    def _collective(self, verb: Callable[..., Any], in_place: bool) -> Callable[..., Any]:
        """`verb(output, input, ...)`, or `verb(tensor, ...)`, queued as NCCL does."""

        def queued(*args: Any, **kwargs: Any) -> _Queued:
            comm = self._comm_of(args, kwargs)
            comm.wait_event(self._current[-1].record_event())
            comm.tick()
            output, given = args[0], args[0 if in_place else 1]
            self._access(given, comm, verb.__name__, writes=False)
            self._access(output, comm, verb.__name__, writes=True)
            self._is_paused = True
            try:
                work = verb(*args, **kwargs)
                if work is not None:
                    work.wait()
            finally:
                self._is_paused = False
            return _Queued(self, comm.record_event())

        return queued

    def _comm_of(self, args: Any, kwargs: dict[str, Any]) -> Stream:
        given = (*args, *kwargs.values())
        groups = (getattr(each, "process_group", each) for each in given)
        group = next(each for each in groups if isinstance(each, dist.ProcessGroup))
        return self._comms.setdefault(
            group, Stream(self._host, f"the stream of group {len(self._comms)}")
        )


class _Queued:
    """A collective's handle: waiting orders streams, not the host."""

    def __init__(self, device: SimulatedDevice, done: Event) -> None:
        self._device = device
        self._done = done

    def wait(self, timeout: object = None) -> None:
        self._device._current[-1].wait_event(self._done)

    def is_completed(self) -> bool:
        return True


@contextmanager
def simulated_device() -> Iterator[SimulatedDevice]:
    """Models wrapped and trained inside run as on a device with streams."""
    device = SimulatedDevice()
    resize = torch.UntypedStorage.resize_

    def noted_resize(storage: torch.UntypedStorage, nbytes: int) -> Any:
        result = resize(storage, nbytes)
        device._resize(storage, nbytes)
        return result

    def streams(_: torch.device, finishing_thread: bool) -> Streams:
        return Streams(torch.device("cuda", 0), finishing_thread)

    def on_host(_: HostMemory, numel: int, dtype: torch.dtype) -> Tensor:
        return device.take_for_host(torch.zeros(numel, dtype=dtype))

    def queued(module: Any, name: str, in_place: bool = False) -> Any:
        verb = device._collective(getattr(module, name), in_place)
        return mock.patch.object(module, name, verb)

    with (
        mock.patch.object(torch, "get_device_module", lambda _: device),
        mock.patch.object(torch.UntypedStorage, "resize_", noted_resize),
        mock.patch.object(root, "Streams", streams),
        mock.patch.object(unit_arguments, "has_separate_memory", lambda _: True),
        mock.patch.object(HostMemory, "empty", on_host),
        queued(collectives, "_issue_all_gather"),
        queued(collectives, "_issue_reduce_scatter"),
        queued(dist, "all_to_all_single"),
        queued(dist, "broadcast", in_place=True),
        device,
    ):
        yield device
