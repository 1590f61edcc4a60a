"""Host memory for offloaded tensors; page-locked, if requested.

torch's allocator for pinned memory suits buffers that come and go: it keeps freed blocks for the
next one, but rounds each up to a power of two, and gives none back. Memory that lives as long as a
model, or is as large, is plain memory here, of exactly the requested size, which the device's
runtime registers.
"""

from __future__ import annotations

import mmap
import os
from typing import Any

import torch

from layerzero.notices import warn_once

_PORTABLE = 1
"""Page-locked for every context of the process."""


class HostMemory:
    """Allocates host memory, page-locked on request, so that copies need not block the host."""

    def __init__(self, pin_memory: bool, device: torch.device) -> None:
        """`device`: the one that copies from and to the memory."""
        self._pin_memory = pin_memory
        self._runtime: DeviceRuntime | None = runtime_of(device) if pin_memory else None

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """[numel] for buffers that come and go.

        torch's allocator reuses a page-locked block only after the copies queued on it have
        finished. It rounds sizes up to a power of two, and keeps what is freed.
        """
        return torch.empty(numel, dtype=dtype, pin_memory=self._pin_memory)

    def lasting(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """[numel] for what lives long or is large: of exactly this size, given back when freed.

        As `empty` where the runtime cannot register memory; warns once where it refuses to.
        """
        if self._runtime is not None and numel:
            try:
                return registered(numel, dtype, self._runtime)
            except RuntimeError as error:
                warn_once(
                    f"the device's runtime could not page-lock {numel * dtype.itemsize} bytes of "
                    f"host memory ({error}); torch's allocator does it instead, which rounds up to "
                    "a power of two and keeps what is freed",
                    "register host memory",
                )
        return self.empty(numel, dtype)


def has_separate_memory(device: torch.device) -> bool:
    """Whether `device` has memory of its own, so that offloading frees some of it."""
    return device.type != "cpu"


class DeviceRuntime:
    """Page-locks memory for a device, through torch's own binding of its runtime."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._calls: Any = self._module.cudart()

    def register(self, address: int, nbytes: int) -> None:
        """Page-lock memory. Raises RuntimeError if the runtime refuses."""
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
        """Wait for copies that are under way, then undo `register`."""
        with self._module.device(self._device):
            self._module.synchronize(self._device)
            self._calls.cudaHostUnregister(address)


def runtime_of(device: torch.device) -> DeviceRuntime | None:
    """None where torch binds no calls that register memory: it does for CUDA and HIP alone."""
    has_binding = hasattr(torch.get_device_module(device), "cudart")
    return DeviceRuntime(device) if has_binding else None


class _Mapping(mmap.mmap):
    """Anonymous memory that unregisters itself before it is unmapped."""

    _runtime: DeviceRuntime | None = None

    def register(self, runtime: DeviceRuntime, address: int, nbytes: int) -> None:
        runtime.register(address, nbytes)
        self._runtime, self._address, self._pid = runtime, address, os.getpid()

    def __del__(self) -> None:
        # A forked child has a copy of the object, but not of the registration.
        if self._runtime is not None and self._pid == os.getpid():
            self._runtime.unregister(self._address)


def registered(numel: int, dtype: torch.dtype, runtime: DeviceRuntime) -> torch.Tensor:
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
