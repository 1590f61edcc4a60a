"""Buffer: a flat tensor that has memory only while it is in use; huge pages for what stays."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable

import torch

HUGE_PAGE_NBYTES = 2 << 20
_ADVISE, _COLLAPSE = 14, 25
"""MADV_HUGEPAGE and, from Linux 6.1 on, MADV_COLLAPSE."""


class Buffer:
    """A tensor whose storage is resized between zero bytes and its full size."""

    note: Callable[[bool], None] | None = None
    """Called when the host issues the gather that takes the buffer, with whether that is behind
    reductions; `allocate` may come later, on a thread. For memory of an arena (graphs/arena.py)."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.storage = tensor.untyped_storage()
        self.nbytes = tensor.nbytes

    def follow(self) -> None:
        """The tensor lies in another storage."""
        self.storage = self.tensor.untyped_storage()

    def allocate(self) -> None:
        self.storage.resize_(self.nbytes)

    def free(self) -> bool:
        """Free the memory; returns False where `numpy()` of a view has fixed the storage's size.
        May be called from another thread, and twice."""
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
