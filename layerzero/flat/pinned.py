"""Page-locked host memory of exactly the requested size, given back when it is freed.

torch's allocator for pinned memory suits buffers that come and go: it keeps freed blocks for the
next one, but rounds each up to a power of two, and gives none back. Memory that lives as long as a
model, or is as large, is plain memory here, which the device's runtime registers.
"""

from __future__ import annotations

import mmap
import os
from typing import Any, Protocol

import torch

_PORTABLE = 1
"""Page-locked for every context of the process."""


class Runtime(Protocol):
    """Page-locks memory for a device."""

    def register(self, address: int, nbytes: int) -> None:
        """Page-lock memory. Raises RuntimeError if the runtime refuses."""

    def unregister(self, address: int) -> None:
        """Wait for copies that are under way, then undo `register`."""


class DeviceRuntime:
    """The runtime of a device, through torch's own binding of it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._calls: Any = self._module.cudart()

    def register(self, address: int, nbytes: int) -> None:
        # In the context of the model's device: the current one may be another.
        with self._module.device(self._device):
            code = int(self._calls.cudaHostRegister(address, nbytes, _PORTABLE))
        # Not `check_error` of torch.cuda: it takes an int for an error, also 0.
        if code:
            raise RuntimeError(
                f"cannot page-lock {nbytes} bytes of host memory: error {code} of the "
                f"{self._device.type} runtime"
            )

    def unregister(self, address: int) -> None:
        with self._module.device(self._device):
            self._module.synchronize(self._device)
            self._calls.cudaHostUnregister(address)


def runtime_of(device: torch.device) -> Runtime | None:
    """None where torch binds no calls that register memory: it does for CUDA and HIP alone."""
    has_binding = hasattr(torch.get_device_module(device), "cudart")
    return DeviceRuntime(device) if has_binding else None


class _Mapping(mmap.mmap):
    """Anonymous memory that unregisters itself before it is unmapped."""

    _runtime: Runtime | None = None

    def register(self, runtime: Runtime, address: int, nbytes: int) -> None:
        runtime.register(address, nbytes)
        self._runtime, self._address, self._pid = runtime, address, os.getpid()

    def __del__(self) -> None:
        # A forked child has a copy of the object, but not of the registration.
        if self._runtime is not None and self._pid == os.getpid():
            self._runtime.unregister(self._address)


def registered(numel: int, dtype: torch.dtype, runtime: Runtime) -> torch.Tensor:
    """[numel] zeros on the CPU, page-locked until the last tensor that shares the memory is gone.

    Raises:
        RuntimeError: the runtime refused.
    """
    nbytes = numel * dtype.itemsize
    if hasattr(mmap, "MAP_ANONYMOUS"):
        memory = _Mapping(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    else:  # Windows
        memory = _Mapping(-1, nbytes)
    tensor = torch.frombuffer(memory, dtype=dtype)
    memory.register(runtime, tensor.data_ptr(), nbytes)
    return tensor
