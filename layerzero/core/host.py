"""Host memory for offloaded tensors."""

from __future__ import annotations

import torch


class HostMemory:
    """Allocates host memory, page-locked on request, so that copies need not block the host.

    torch's allocator reuses a page-locked block only after the copies queued on it have finished.
    """

    def __init__(self, pin_memory: bool) -> None:
        self._pin_memory = pin_memory

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, pin_memory=self._pin_memory)


def has_separate_memory(device: torch.device) -> bool:
    """Whether `device` has memory of its own, so that offloading frees some of it."""
    return device.type != "cpu"
