"""What lives on a device at most, from one look to the next.

On an accelerator its allocator knows. On the CPU nobody does: there, while an engine learns, every
operation of the thread that trains is seen, and with it every storage that the steps make or touch.
Resizes are seen on any thread. Tensors that no step touches do not count.

Note [Below all other modes]
    Learning begins in one forward and ends in another, so it is no block of code; a mode that is
    entered in between would be left in the wrong order. So ours lies below all others.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.utils import _python_dispatch as dispatch
from torch.utils._pytree import tree_leaves

from layerzero.comm.gloo.threads import FinishingStream, OnThread
from layerzero.comm.streams import Waitable
from layerzero.memory_budget.storages import CountingMode, StorageCount, begin_resizes, end_resizes

_PLAIN = torch.Tensor.__torch_dispatch__


class Meter(NamedTuple):
    """Measures until it is stopped."""

    look: Callable[[], int]
    """Returns the most bytes that lived since the last look."""
    stop: Callable[[], None]
    """May be called after the model is gone."""


def check_device(device: torch.device) -> None:
    """Raise NotImplementedError if the device's module has no statistics of its memory."""
    if device.type == "cpu":
        return
    module = torch.get_device_module(device)
    names = ("max_memory_allocated", "reset_peak_memory_stats")
    missing = [name for name in names if not hasattr(module, name)]
    if missing:
        raise NotImplementedError(
            f"memory_budget: torch.{device.type} has no {' and no '.join(missing)}, so "
            "live memory cannot be measured; leave memory_budget out"
        )


def start_meter(device: torch.device, tensors: Iterable[torch.Tensor]) -> Meter:
    """Measure what the caching allocator of the device has given out; on the CPU, what the steps of
    this thread hold.

    Args:
        tensors: what the engine holds.
    """
    if device.type == "cpu":
        count = StorageCount()
        mode = _TouchingMode(count)
        begin_resizes(count)
        for tensor in tensors:
            count.note(tensor)
        _insert(mode)
        count.restart()

        def stop() -> None:
            end_resizes(count)
            _remove(mode)

        return Meter(count.restart, stop)
    module = torch.get_device_module(device)

    def look() -> int:
        peak = int(module.max_memory_allocated(device))
        module.reset_peak_memory_stats(device)
        return peak

    look()
    return Meter(look, lambda: None)


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


class LateStream(FinishingStream):
    """Runs its work on the thread that waits for it, after all that was enqueued before.

    The thread of gloo's reduce stream frees what a reduction held some time after its data has
    come. What a step holds at most differs by that from run to run; a budget must hold for the
    latest time.
    """

    def __init__(self) -> None:
        super().__init__()
        self._late: deque[OnThread] = deque()

    def _enqueue(self, work: Callable[[], Waitable | None]) -> Waitable:
        self._last = _Late(work, self._late)
        self._late.append(self._last)
        return self._last


class _Late(OnThread):
    def __init__(self, work: Callable[[], Waitable | None], queue: deque[OnThread]) -> None:
        super().__init__(work, threading.current_thread())
        self._before = queue

    def wait(self) -> None:
        while not self.is_done:
            self._before.popleft().run()
        super().wait()
