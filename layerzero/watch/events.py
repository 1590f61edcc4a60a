"""Events that are recorded again and again, instead of made and destroyed each time.

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
"""

from __future__ import annotations

from collections import deque
from typing import Any
from weakref import WeakKeyDictionary

import torch

from layerzero.watch.cuda_driver import is_done


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
        """Block the host until the device has reached this place."""
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


_pools: WeakKeyDictionary[Any, dict[torch.device, EventPool]] = WeakKeyDictionary()
"""Pools by stream interface (such as `torch.cuda`) and device; an event belongs to one device."""


def event_pool(module: Any, device: torch.device) -> EventPool:
    """The pool of a device, with an index, of its stream interface (flat/device_streams.py)."""
    pools = _pools.setdefault(module, {})
    return pools.setdefault(device, EventPool(getattr(module, "event_pool_capacity", None)))
