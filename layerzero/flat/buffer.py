"""Buffer: a flat tensor that has memory only while it is in use; huge pages for what stays."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from typing import Protocol

import torch

HUGE_PAGE_NBYTES = 2 << 20
_ADVISE, _COLLAPSE = 14, 25
"""MADV_HUGEPAGE and, from Linux 6.1 on, MADV_COLLAPSE."""


class Lease(Protocol):
    """Memory for one buffer in an arena, which `layerzero/graphs/arena.py` hands out."""

    def note(self, is_behind: bool) -> None:
        """The host issues the gather that takes the buffer, perhaps behind reductions; `take` may
        come later, on a thread."""

    def take(self, storage: torch.UntypedStorage) -> bool:
        """Give an empty storage memory of the arena. Returns False where that has none free."""

    def give_back(self, storage: torch.UntypedStorage) -> bool:
        """Empty the storage. Returns False where it has no memory of the arena. May be called
        from another thread, and twice."""


class Buffer:
    """A tensor whose storage is resized between zero bytes and its full size."""

    def __init__(self, tensor: torch.Tensor, lease: Lease | None = None) -> None:
        """`lease`: the tensor's memory in an arena; None: it is allocated by itself."""
        self.tensor = tensor
        self.storage = tensor.untyped_storage()
        self.nbytes = self.storage.nbytes()
        self.lease = lease

    def follow(self) -> None:
        """The tensor lies in another storage."""
        self.storage = self.tensor.untyped_storage()

    def allocate(self) -> None:
        if self.lease is None or not self.lease.take(self.storage):
            self.storage.resize_(self.nbytes)

    def free(self) -> bool:
        """Free the memory; returns False where `numpy()` of a view has fixed the storage's size.
        May be called from another thread, and twice."""
        if self.lease is not None and self.lease.give_back(self.storage):
            return True
        is_resizable = self.storage.resizable()
        if is_resizable:
            self.storage.resize_(0)
        return is_resizable


def prefer_huge_pages(tensor: torch.Tensor, collapse: bool = True) -> None:
    """Advise the kernel to back the memory of a CPU tensor with huge pages; no value changes.

    A pass over several tensors at once otherwise waits for page tables: a step of AdamW takes twice
    as long. Only pages that lie wholly inside it, so it takes no memory. Without effect where the
    kernel has no such pages, or gives none.

    Args:
        collapse: turn pages that are in use into huge ones, too. Else only those to come.
    """
    madvise = _madvise()
    if madvise is None or tensor.device.type != "cpu":
        return
    address = tensor.data_ptr()  # 0: a tensor without memory.
    begin = -(-address // HUGE_PAGE_NBYTES) * HUGE_PAGE_NBYTES
    nbytes = (address + tensor.nbytes) // HUGE_PAGE_NBYTES * HUGE_PAGE_NBYTES - begin
    if nbytes > 0 and address:
        for advice in (_ADVISE, _COLLAPSE) if collapse else (_ADVISE,):
            madvise(begin, nbytes, advice)


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is not None:
        madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return madvise
