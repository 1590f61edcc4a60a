"""The stream interface of a device: its own module's, else torch's generic one.

`torch.cuda`, `torch.xpu` and `torch.npu` have `Stream`, `stream` and `current_stream`. A device
that registers with torch (PrivateUse1) need not: torch's `Stream` and `torch.accelerator` serve it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_NAMES = ("Stream", "stream", "current_stream")


def stream_interface(device: torch.device) -> Any:
    """An object with `Stream(device=)`, `stream(stream)` and `current_stream(device)`."""
    module = torch.get_device_module(device)
    return _Generic if missing_stream_names(module) else module


def missing_stream_names(module: Any) -> list[str]:
    """Names that the device module would have to have."""
    return [name for name in _NAMES if not hasattr(module, name)]


def has_generic_streams(device: torch.device) -> bool:
    """Whether torch can make a stream on the device without the help of its module."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != device.type:
        return False  # `torch.accelerator` serves one type of device.
    try:
        torch.Stream(device=device.type)
    except (RuntimeError, NotImplementedError):
        return False
    return True


class _Generic:
    event_pool_capacity = 0
    """Events kept to be recorded again: none. On OpenReg a queued wait sees the later record, and
    may hang, against torch's contract. Devices like CUDA have a module with their own streams."""
    Stream = torch.Stream
    current_stream = staticmethod(torch.accelerator.current_stream)

    @staticmethod
    @contextmanager
    def stream(stream: torch.Stream) -> Iterator[None]:
        # Not `with stream:`: older releases of torch refuse to nest that for one stream.
        device = torch.accelerator.current_device_index()
        before = torch.accelerator.current_stream(stream.device)
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)
            # `set_stream` makes the stream's device the current one.
            torch.accelerator.set_device_index(device)
