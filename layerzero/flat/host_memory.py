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
from torch import get_device_module

_PORTABLE = 1
"""Page-locked for every context of the process."""


class HostMemory:
    """Allocates host memory, page-locked on request, so that copies need not block the host."""

    def __init__(self, pin_memory: bool, device: torch.device) -> None:
        """`device`: the one that copies from and to the memory."""
        self._pin_memory = pin_memory
        self._device = device

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """[numel] for buffers that come and go.

        torch's allocator reuses a page-locked block only after the copies queued on it have ended.
        """
        return torch.empty(numel, dtype=dtype, pin_memory=self._pin_memory, device="cpu")

    def lasting(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """[numel] for what lives long or is large: of exactly this size, given back when freed.

        As `empty` where torch binds no calls that register memory, or where these refuse.
        """
        # torch binds them for CUDA and HIP alone.
        if numel and self._pin_memory and hasattr(get_device_module(self._device), "cudart"):
            memory = Registered(numel * dtype.itemsize, self._device)
            if memory.is_registered:
                return torch.frombuffer(memory, dtype=dtype)
        return self.empty(numel, dtype)


def has_separate_memory(device: torch.device) -> bool:
    """Whether `device` has memory of its own, so that offloading frees some of it."""
    return device.type != "cpu"


class Registered(mmap.mmap):
    """Anonymous memory of zeros that the device's runtime page-locks until it is unmapped."""

    is_registered = False

    def __new__(cls, nbytes: int, device: torch.device) -> Registered:
        return super().__new__(cls, -1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._module: Any = get_device_module(device)
        self._device, self._pid = device, os.getpid()
        self._address = torch.frombuffer(self, dtype=torch.uint8).data_ptr()
        # In the context of the model's device: the current one may be another.
        with self._module.device(device):
            calls = self._module.cudart()
            # Not `check_error` of torch.cuda: it takes an int for an error, also 0.
            self.is_registered = not int(calls.cudaHostRegister(self._address, nbytes, _PORTABLE))

    def __del__(self) -> None:
        # A forked child has a copy of the object, but not of the registration.
        if self.is_registered and self._pid == os.getpid():
            with self._module.device(self._device):
                self._module.synchronize(self._device)  # Copies may be under way.
                self._module.cudart().cudaHostUnregister(self._address)
