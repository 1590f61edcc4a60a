"""Lanes: the one place that knows whether a device has streams.

On a device with streams a lane is a side stream: work is queued on it, a `Mark` is an event, and
waiting for one orders streams without blocking the host. On CPU a lane runs at once on the host,
and what overlaps with compute is the collective itself, through its asynchronous handle; a mark
orders nothing there, because the host is already in order.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Protocol

import torch

Mark = Any
"""An event on a device with streams; None on CPU."""


class Waitable(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Order what comes next on the compute lane after the result."""

    def drain(self) -> None:
        """Return when nothing reads or writes this rank's buffers any more."""


class HostLane:
    """A lane of a device without streams: everything is in host order already."""

    def __enter__(self) -> HostLane:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def wait(self, mark: Mark) -> None:
        """Nothing to order."""

    def mark(self) -> Mark:
        return None

    def settle(self, pending: Waitable) -> Waitable:
        """The collective runs by itself; whoever needs the result waits for it."""
        return pending


class DeviceLane:
    """A side stream. Enter it to queue work there; buffers allocated inside belong to it."""

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device)
        self._stream = self._module.Stream(device=device)
        self._entered: list[Any] = []

    def __enter__(self) -> DeviceLane:
        context = self._module.stream(self._stream)
        context.__enter__()
        self._entered.append(context)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._entered.pop().__exit__(kind, error, traceback)

    def wait(self, mark: Mark) -> None:
        """Queue nothing further before what `mark` stands for has happened."""
        if mark is not None:
            self._stream.wait_event(mark)

    def mark(self) -> Mark:
        return self._stream.record_event()

    def settle(self, pending: Waitable) -> Waitable:
        """Order the lane after the collective and hand out the lane's own mark of it."""
        pending.wait()
        return _OnLane(self._module, self.mark(), pending)


class _OnLane:
    """A collective queued on a side stream; waiting orders the current stream after it."""

    def __init__(self, module: Any, mark: Mark, pending_keepalive: Waitable) -> None:
        self._module = module
        self._mark = mark
        self._pending_keepalive = pending_keepalive

    def wait(self) -> None:
        self._module.current_stream().wait_event(self._mark)

    def drain(self) -> None:
        self.wait()


class Streams:
    """The lanes of one model.

    Attributes:
        pre_unshard: casts of main shards; beside `unshard` so that a cast for the next unit does
            not queue behind a gather.
        unshard: all-gathers into full buffers, which are allocated there.
        reduce: gradient reductions.
    """

    def __init__(self, device: torch.device) -> None:
        self._module = None if device.type == "cpu" else torch.get_device_module(device)
        self.pre_unshard = self._lane(device)
        self.unshard = self._lane(device)
        self.reduce = self._lane(device)

    @staticmethod
    def _lane(device: torch.device) -> HostLane | DeviceLane:
        return HostLane() if device.type == "cpu" else DeviceLane(device)

    def mark_compute(self) -> Mark:
        """A mark behind everything queued on the compute stream so far."""
        if self._module is None:
            return None
        return self._module.current_stream().record_event()
