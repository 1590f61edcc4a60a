"""Large buffers in pages of 2 MiB.

A pass over several buffers at once otherwise waits for page tables; and memory that comes and goes
is mapped anew each time, page by page: a buffer of 12 MB takes 3000 page faults, or 6.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable

import torch

_LEAST_NBYTES = 4 << 20
"""Bytes from which a short-lived buffer gets huge pages."""
HUGE_PAGE_NBYTES = 2 << 20
_ADVISE, _COLLAPSE = 14, 25
"""MADV_HUGEPAGE and, from Linux 6.1 on, MADV_COLLAPSE."""


def prefer_huge_pages(tensor: torch.Tensor, collapse: bool = True) -> None:
    """Advise the kernel to back the memory of a CPU tensor with huge pages; no value changes.

    Only pages that lie wholly inside it, so it takes no memory. Without effect where the kernel has
    no such pages, or gives none.

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


def is_worth_huge_pages(tensor: torch.Tensor) -> bool:
    """Whether to call `prefer_huge_pages` each time a buffer is allocated. Called once for each
    buffer, so that small ones, and those on a device, cost no host time."""
    return tensor.device.type == "cpu" and tensor.nbytes >= _LEAST_NBYTES


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is not None:
        madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return madvise
