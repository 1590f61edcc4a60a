"""Host memory beside a device's: where offloaded tensors live."""

from __future__ import annotations

import torch


class HostMemory:
    """Allocates on the host, page-locked if asked, so that copies need not block the host.

    torch's allocator of page-locked memory hands a block out again only when the copies that were
    queued with it are done.
    """

    def __init__(self, pin_memory: bool) -> None:
        self._pin_memory = pin_memory

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, pin_memory=self._pin_memory)


def has_separate_memory(device: torch.device) -> bool:
    """Whether `device` has memory of its own, so that offloading makes room there."""
    return device.type != "cpu"
