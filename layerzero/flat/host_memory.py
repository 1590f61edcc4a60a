"""Host memory for offloaded tensors."""

from __future__ import annotations

import torch

from layerzero.flat.pinned import Runtime, registered, runtime_of
from layerzero.notices import warn_once


class HostMemory:
    """Allocates host memory, page-locked on request, so that copies need not block the host."""

    def __init__(self, pin_memory: bool, device: torch.device) -> None:
        """`device`: the one that copies from and to the memory."""
        self._pin_memory = pin_memory
        self._runtime: Runtime | None = runtime_of(device) if pin_memory else None

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
                    "register host memory",
                    f"the device's runtime could not page-lock {numel * dtype.itemsize} bytes of "
                    f"host memory ({error}); torch's allocator does it instead, which rounds up to "
                    "a power of two and keeps what is freed",
                )
        return self.empty(numel, dtype)


def has_separate_memory(device: torch.device) -> bool:
    """Whether `device` has memory of its own, so that offloading frees some of it."""
    return device.type != "cpu"
