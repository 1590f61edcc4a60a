"""Graphs of the simulated device: what is queued during a capture, replayed by address.

A capture executes nothing on a device. Here its operations do run, so that the rest of the capture
has tensors of the right kinds; when it ends, memory of before it, and the random generator, get
back what they held. docs/internals/streams.md says what a replay does, and what it reports.
"""

import ctypes
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.harness.simulated_streams import Host, Stream, covers


class Place:
    """A storage that a graph uses."""

    def __init__(
        self, storage: torch.UntypedStorage, is_own: bool, is_in_arena: bool = False
    ) -> None:
        """
        Args:
            is_own: allocated in the capture, so the graph keeps it.
            is_in_arena: the memory stays when the storage leaves it.
        """
        self._ref = weakref.ref(storage)
        self._address = storage.data_ptr()
        self._nbytes = storage.nbytes()
        self.is_own, self.is_in_arena = is_own, is_in_arena
        self._kept = storage if is_own else None
        if is_in_arena:
            memory = (ctypes.c_byte * self._nbytes).from_address(self._address)
            self._kept = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()

    def outlive(self, storage: torch.UntypedStorage) -> None:
        """The storage was freed: its memory stays in the pool."""
        if self._kept is storage:
            self._kept = torch.UntypedStorage(self._nbytes)
            self._address = self._kept.data_ptr()

    def find(self) -> torch.UntypedStorage | None:
        """The memory at the address; None if it was freed or moved since."""
        storage = self._kept or self._ref()
        if storage is None or storage.data_ptr() != self._address:
            return None
        return storage if storage.nbytes() == self._nbytes else None


class _FreedMemory(Exception):
    pass


@dataclass(frozen=True)
class _View:  # No tuple, which pytree would flatten.
    """A tensor by its address."""

    place: Place
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]

    def tensor(self) -> Tensor:
        storage = self.place.find()
        if storage is None:
            raise _FreedMemory
        made = torch.empty(0, dtype=self.dtype)
        return made.set_(storage, self.offset, self.size, self.stride)


class _Queued(NamedTuple):
    name: str
    call: Callable[..., Any]
    args: Any
    kwargs: Any
    made: Sequence[tuple[int, _View]]
    """Of its results that are memory of their own: which, and where."""


class Graph:
    """Stands for `torch.cuda.CUDAGraph`."""

    def __init__(
        self,
        host: Host,
        use: Callable[[Iterable[tuple[Tensor, bool]]], None],
        is_in_arena: Callable[[torch.UntypedStorage], bool],
    ) -> None:
        """
        Args:
            use: notes that all these are read, or written, on the current stream.
            is_in_arena: whether a storage is in memory of an arena now.
        """
        self._host = host
        self._use = use
        self._is_in_arena = is_in_arena
        self._queued: list[_Queued] = []
        self._places: dict[tuple[bool, int, int], Place] = {}
        self._saved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self.streams: list[Stream] = []
        """Those whose work it records, the first of them first."""
        self._written: set[int] = set()
        """Storages of before the capture that it writes."""

    def pool(self) -> object:
        return self

    def begin(self, stream: Stream) -> None:
        if self._host.capture is not None:
            self._host.on_fault("a capture inside another one")
        self._host.capture = self
        self.admit(stream)
        self._random = torch.get_rng_state()

    def admit(self, stream: Stream) -> None:
        stream.capture = self
        self.streams.append(stream)

    def end(self) -> None:
        origin, *others = self.streams
        for stream in others:
            if not covers(origin.clock, stream.clock):
                self._host.on_fault(f"the capture ends before {stream.name} is joined")
        for stream in self.streams:
            stream.capture = None
        self._host.capture = None
        for storage, saved in self._saved.values():
            if storage.nbytes() == saved.nbytes():
                storage.copy_(saved)
        self._written = {*self._saved}
        self._saved.clear()
        torch.set_rng_state(self._random)

    def before(self, written: Iterable[Tensor]) -> None:
        """These are about to be written."""
        for tensor in written:
            storage = tensor.untyped_storage()
            place = self._places.get(self._key(storage))
            is_outside = place is None or not place.is_own
            if is_outside and storage._cdata not in self._saved:
                self._saved[storage._cdata] = storage, storage.clone()

    def resize(self, storage: torch.UntypedStorage) -> None:
        """It was freed, or allocated."""
        place = self._places.pop(self._key(storage), None)
        if place is not None:
            place.outlive(storage)
        if storage.nbytes():
            self._places[self._key(storage)] = Place(storage, is_own=True)

    def resized_outside(self, storage: torch.UntypedStorage) -> None:
        """It was freed, or allocated, when nothing was recorded."""
        place = self._places.get(self._key(storage))
        if place is not None:
            place.outlive(storage)

    def allocated(self, tensors: Iterable[Tensor]) -> None:
        """New memory, of the pool."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._places[self._key(storage)] = Place(storage, is_own=True)

    def record(
        self, name: str, call: Callable[..., Any], args: Any, kwargs: Any, result: Any
    ) -> None:
        """`call(*args, **kwargs)` was queued, and returned `result` here."""
        args, kwargs = tree_map_only(Tensor, self._view_of, (args, kwargs))
        given = {view.place for view in tree_leaves((args, kwargs)) if isinstance(view, _View)}
        made = []
        for index, each in enumerate(tree_leaves(result)):
            if isinstance(each, Tensor):
                known = self._places.get(self._key(each.untyped_storage()))
                if known is None or known not in given:
                    self.allocated([each])
                    made.append((index, self._view_of(each)))
        self._queued.append(_Queued(name, call, args, kwargs, made))

    def _key(self, storage: torch.UntypedStorage) -> tuple[bool, int, int]:
        if self._is_in_arena(storage):  # Buffers of several sizes may begin at one address.
            return True, storage.data_ptr(), storage.nbytes()
        return False, storage._cdata, 0

    def _view_of(self, tensor: Tensor) -> _View:
        storage = tensor.untyped_storage()
        key = self._key(storage)
        place = self._places.get(key)
        if place is None or place.find() is None:  # Or a new storage in the place of one.
            place = self._places[key] = Place(storage, is_own=False, is_in_arena=key[0])
        assert not (tensor.is_conj() or tensor.is_neg()), "no model of the tests has these"
        size, stride = tensor.size(), tensor.stride()
        return _View(place, tensor.dtype, tensor.storage_offset(), size, stride)

    def replay(self) -> None:
        """Run what was recorded; nothing that uses memory which is gone."""
        for name, call, args, kwargs, made in self._queued:
            try:
                own_args, own_kwargs = _tensors(args), _tensors(kwargs)
                targets = [(index, view.tensor()) for index, view in made]
            except _FreedMemory:
                self._host.on_fault(f"a replay of {name} uses memory that was freed or moved since")
                continue
            results = tree_leaves(call(*own_args, **own_kwargs))
            for index, target in targets:
                target.copy_(results[index])
        found = [(place, each) for place in self._places.values() if (each := place.find())]
        self._use(
            (
                torch.empty(0, dtype=torch.uint8).set_(storage),
                place.is_own or place.is_in_arena or storage._cdata in self._written,
            )
            for place, storage in found
        )


def _tensors(value: Any) -> Any:
    if isinstance(value, _View):
        return value.tensor()
    if type(value) in (list, tuple):
        return type(value)(map(_tensors, value))
    if type(value) is dict:
        return {key: _tensors(each) for key, each in value.items()}
    return value
