"""StorageCount: the bytes of all tensor storages that live, their peak, and what they are for.

A dispatch mode sees each storage when an operation first returns a tensor on it; a weak reference
tells when it dies, and the event `resized` when the engine resizes it. So the cost of an operation
does not depend on how many storages live.

Not counted: what a kernel allocates and frees inside one operation, which returns no tensor on it;
what others resize.

`start_meter` measures what lives on a device at most, from one look to the next. An accelerator's
allocator knows. On the CPU, while an engine learns, every operation of the thread that trains is
seen, and with it every storage that the steps make or touch. Tensors that no step touches, and that
are not the model's, do not count.

Note [Below all other modes]
    Learning begins in one forward and ends in another, so it is no block of code; a mode that is
    entered in between would be left in the wrong order. So ours lies below all others.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _python_dispatch as dispatch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

_PLAIN = torch.Tensor.__torch_dispatch__


@dataclass(slots=True)
class Counted:
    """One storage: its bytes now, and the kind of memory it is."""

    kind: str
    nbytes: int
    alive: weakref.ref[torch.UntypedStorage]


class StorageCount:
    """Counts the storages that a `CountingMode` sees; the counts hold no storage alive."""

    live: int
    """Bytes of the storages that live now."""
    peak: int
    """Most bytes since `restart`."""
    kind: str
    """Kind of the storages that are made next."""
    moment: tuple[str, str]
    """What runs now: the name of a unit, and a part of the step."""
    peak_moment: tuple[str, str]

    def __init__(self) -> None:
        self.live = self.peak = 0
        self.kind = "activations"
        self.moment = self.peak_moment = ("", "")
        self._counted: dict[int, Counted] = {}
        self._lock = threading.RLock()  # Storages die, and are resized, on any thread.
        self._at_peak: list[tuple[Counted, int]] = []
        self._is_rising = True

    @contextmanager
    def of_kind(self, kind: str) -> Iterator[None]:
        before, self.kind = self.kind, kind
        try:
            yield
        finally:
            self.kind = before

    def restart(self) -> int:
        """Begin a new peak; returns the one before."""
        before = self.peak
        self.peak, self.peak_moment, self._is_rising = self.live, self.moment, True
        return before

    def note(self, tensor: torch.Tensor) -> None:
        """Count the storage of `tensor`, if it is new."""
        for part in _parts(tensor):
            storage = part.untyped_storage()
            key = storage._cdata
            counted = self._counted.get(key)
            if counted is not None and counted.alive() is storage:
                continue
            with self._lock:
                alive = weakref.ref(storage, self._forget(key))
                counted = self._counted[key] = Counted(self.kind, storage.nbytes(), alive)
                self._add(counted.nbytes)

    def mark(self, tensors: Iterable[torch.Tensor], kind: str) -> None:
        for tensor in tensors:
            self.note(tensor)
            for part in _parts(tensor):
                storage = part.untyped_storage()
                self._counted[storage._cdata].kind = kind
                self.resized(storage)  # Perhaps before this count heard of it.

    def by_kind(self) -> dict[str, int]:
        """Bytes that live now."""
        return sums((counted, counted.nbytes) for counted in [*self._counted.values()])

    def at_peak(self) -> list[tuple[Counted, int]]:
        """The storages that lived at the peak, and their bytes then."""
        self._note_peak()
        return self._at_peak

    def _forget(self, key: int) -> Callable[[object], None]:
        def died(alive: object) -> None:
            with self._lock:
                counted = self._counted.get(key)
                if counted is not None and counted.alive is alive:
                    self._note_peak()
                    del self._counted[key]
                    self.live -= counted.nbytes

        return died

    def resized(self, storage: torch.UntypedStorage) -> None:
        """On any thread."""
        with self._lock:
            counted = self._counted.get(storage._cdata)
            if counted is not None and counted.alive() is storage:
                added = storage.nbytes() - counted.nbytes
                if added < 0:
                    self._note_peak()
                counted.nbytes += added
                self._add(added)

    def _add(self, nbytes: int) -> None:
        self.live += nbytes
        if self.live > self.peak:
            self.peak, self.peak_moment, self._is_rising = self.live, self.moment, True

    def _note_peak(self) -> None:
        """Memory is about to fall: note what lives, if the peak has risen. Once for each rise."""
        if self._is_rising:
            self._is_rising = False
            # In two steps: a pair that is made may have garbage collected, in which storages die.
            self._at_peak = [(each, each.nbytes) for each in [*self._counted.values()]]


class CountingMode(TorchDispatchMode):
    """Tells a `StorageCount` of the results of every operation on this thread."""

    def __init__(self, count: StorageCount) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._count = count

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch keeps its compiler out of each call; it costs time, and none runs here."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # A DTensor, say: what it does with the tensors inside is seen.
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self._count.note(result)
        elif isinstance(result, (tuple, list)):
            for each in result:
                if isinstance(each, torch.Tensor):
                    self._count.note(each)
        return result


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        inner = (getattr(tensor, name) for name in names)
        return tuple(p for part in inner if isinstance(part, torch.Tensor) for p in _parts(part))
    return (tensor,) if tensor.layout is torch.strided else ()


def sums(counted: Iterable[tuple[Counted, int]]) -> dict[str, int]:
    """Bytes by the kind that each storage has by now."""
    found: dict[str, int] = {}
    for each, nbytes in counted:
        found[each.kind] = found.get(each.kind, 0) + nbytes
    return found


class Meter(NamedTuple):
    """Measures until it is stopped."""

    look: Callable[[], int]
    """Returns the most bytes that lived since the last look."""
    resized: Callable[[torch.UntypedStorage], None]
    """To be called with each storage that the engine resizes."""
    stop: Callable[[], None]
    """May be called after the model is gone."""


def start_meter(device: torch.device, model: nn.Module) -> Meter:
    """Measure what the caching allocator of the device has given out; on the CPU, what the steps of
    this thread hold, and the model."""
    if device.type == "cpu":
        count = StorageCount()
        mode = _TouchingMode(count)
        for tensor in (*model.parameters(), *model.buffers()):
            count.note(tensor)
        _insert(mode)
        count.restart()
        return Meter(count.restart, count.resized, partial(_remove, mode))
    module = torch.get_device_module(device)

    def look() -> int:
        peak = int(module.max_memory_allocated(device))
        module.reset_peak_memory_stats(device)
        return peak

    look()
    return Meter(look, lambda storage: None, lambda: None)


class _TouchingMode(CountingMode):
    """Counts what operations are given, too: it may be older than the count."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__torch_dispatch__ is not _PLAIN for kind in types):
            return NotImplemented  # Let a subclass unwrap what it holds; that is counted then.
        for each in tree_leaves((args, kwargs)):
            if isinstance(each, torch.Tensor) and each.device.type == "cpu":
                self._count.note(each)
        return super().__torch_dispatch__(func, types, args, kwargs)


def _insert(mode: _TouchingMode) -> None:
    """See Note [Below all other modes]."""
    above = [dispatch._pop_mode() for _ in dispatch._get_current_dispatch_mode_stack()]
    for each in (mode, *reversed(above)):
        dispatch._push_mode(each)


def _remove(mode: _TouchingMode) -> None:
    stack = dispatch._get_current_dispatch_mode_stack()
    if not any(each is mode for each in stack):
        return  # On another thread.
    for _ in stack:
        dispatch._pop_mode()
    for each in stack:
        if each is not mode:
            dispatch._push_mode(each)
