"""Huge pages for memory that stays: of optimizers, and of a checkpoint while it is read."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable

import torch

HUGE_PAGE_NBYTES = 2 << 20
_ADVISE, _COLLAPSE = 14, 25
"""MADV_HUGEPAGE and, from Linux 6.1 on, MADV_COLLAPSE."""


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
