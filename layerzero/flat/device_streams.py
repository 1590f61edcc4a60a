"""The stream interface of a device: its own module's, else torch's generic one.

`torch.cuda`, `torch.xpu` and `torch.npu` have `Stream`, `stream` and `current_stream`. A device
that registers with torch (PrivateUse1) need not: torch's `Stream` and `torch.accelerator` serve it.
"""

from __future__ import annotations

from typing import Any

import torch

_NAMES = ("Stream", "stream", "current_stream")


def stream_interface(device: torch.device) -> Any:
    """An object with `Stream(device=)`, `current_stream(index)`, and, unless its streams are
    contexts, `stream(stream)`."""
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
    stream: Any = None
    """Its streams are contexts themselves."""
    current_stream = staticmethod(torch.accelerator.current_stream)
