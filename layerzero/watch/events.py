"""Streams of any device, and events that are recorded again instead of made and destroyed.

Note [An event may be recorded again once nothing refers to it]
    A wait that was queued on a stream is for the record that the event had then; later records do
    not change it. So another record can only mislead code that waits, or queries, later. Such code
    needs a reference to the `PooledEvent`; the event is free once the last reference is gone.

Note [No thread but the main one destroys events]
    Destroying an event takes a lock of the driver, which a stuck collective may hold, and torch
    keeps the GIL meanwhile. On a watchdog's thread that would stop the whole process at the very
    moment that the watchdog is for. So events go to a pool, from whichever thread, and the pool
    belongs to the process: it outlives the models, of which a watchdog's thread may hold the last
    reference.

Two calls go to the CUDA driver, which torch does not offer to a thread beside the main one: through
ctypes, on the driver that the process has loaded. Without one (CPU, other devices, ROCm) nothing
happens. The driver and not the runtime, because its name does not change with the version, and
torch may have linked the runtime statically.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from collections import deque
from typing import Any

import torch

_NAMES = ("Stream", "stream", "current_stream")
"""Names of a stream interface, as `torch.cuda`, `torch.xpu` and `torch.npu` have them."""
_CAPTURE_THREAD_LOCAL = 1
"""CU_STREAM_CAPTURE_MODE_THREAD_LOCAL"""
_SUCCESS = 0
_NOT_READY = 600
"""CUDA_ERROR_NOT_READY"""

_logger = logging.getLogger(__name__)


def stream_interface(device: torch.device) -> Any:
    """An object with `Stream(device=)`, `current_stream(index)`, and, unless its streams are
    contexts, `stream(stream)`."""
    module = torch.get_device_module(device)
    return module if _has_its_own(module) else _Generic


def _has_its_own(module: Any) -> bool:
    return all(hasattr(module, name) for name in _NAMES)


def has_streams(device: torch.device) -> bool:
    """Whether the device has streams: of its module, or such as torch can make without that."""
    if _has_its_own(getattr(torch, device.type, None)):
        return True
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != device.type:
        return False  # `torch.accelerator` serves one type of device.
    try:
        torch.Stream(device=device.type)
    except (RuntimeError, NotImplementedError):
        return False
    return True


class _Generic:
    """torch's own, for a device that registers with torch (PrivateUse1) and need not have them."""

    event_pool_capacity = 0
    """Events kept to be recorded again: none. On OpenReg a queued wait sees the later record, and
    may hang, against torch's contract. Devices like CUDA have a module with their own streams."""
    Stream = torch.Stream
    stream: Any = None
    """Its streams are contexts themselves."""
    current_stream = staticmethod(torch.accelerator.current_stream)


class PooledEvent:
    """A place in a stream. Its event returns to the pool when nothing refers to this object."""

    __slots__ = ("_event", "_free", "_waiter")

    def __init__(self, event: Any, free: deque[Any]) -> None:
        self._event = event
        self._free = free
        self._waiter: Any = None

    def wait(self, stream: Any) -> None:
        """Order what is queued on `stream` from now on after this place."""
        if stream is not self._waiter:  # A stream that has waited for it stays in order.
            self._waiter = stream
            self._event.wait(stream)

    def query(self) -> bool:
        """Whether the device has reached this place."""
        return is_done(self._event)

    def synchronize(self) -> None:
        self._event.synchronize()

    def __del__(self) -> None:
        self._free.append(self._event)


Event = PooledEvent | None
"""A place in a stream of a device; None on CPU."""


class EventPool:
    """The events of one device that are not in use; see the Notes above."""

    def __init__(self, capacity: int | None = None) -> None:
        """`capacity`: events that it keeps at most; None: all."""
        self._free: deque[Any] = deque(maxlen=capacity)

    def record(self, stream: Any) -> PooledEvent:
        """Record an event on `stream`; makes one only if all others are in use."""
        try:
            event = self._free.pop()
        except IndexError:
            event = stream.record_event()
        else:
            event.record(stream)
        return PooledEvent(event, self._free)


@functools.cache
def event_pool(module: Any, device: torch.device) -> EventPool:
    """The pool of a device, with an index, of its stream interface."""
    return EventPool(getattr(module, "event_pool_capacity", None))


@functools.cache
def _driver() -> Any:
    """The driver, if the process has loaded it; else None."""
    if not hasattr(os, "RTLD_NOLOAD"):
        return None
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD)
        driver.cuEventQuery.argtypes = [ctypes.c_void_p]
        return driver
    except (OSError, AttributeError) as error:
        _logger.debug("no CUDA driver is loaded: %s", error)
        return None


def ignore_captures_of_other_threads() -> None:
    """Let this thread query events while another thread captures a graph.

    By default a query on any thread invalidates a capture that was begun in mode "global", which
    is torch's default. Concerns the calling thread alone.
    """
    driver = _driver()
    if driver is not None:
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_CAPTURE_THREAD_LOCAL)))


def is_done(event: Any) -> bool:
    """`event.query()`, on CUDA without the GIL, which torch keeps.

    A query may block on a lock of the driver while a collective is stuck.
    """
    driver = _driver() if hasattr(event, "cuda_event") else None
    if driver is not None:
        code = driver.cuEventQuery(event.cuda_event)  # ctypes releases the GIL.
        if code in (_SUCCESS, _NOT_READY):
            return bool(code == _SUCCESS)
    return bool(event.query())  # It raises, and names what is wrong.
