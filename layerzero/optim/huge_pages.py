"""Large buffers in pages of 2 MiB: a pass over several at once otherwise waits for page tables."""

from __future__ import annotations

import ctypes
import sys

import torch

_PAGE = 2 << 20
_ADVISE, _COLLAPSE = 14, 25
"""MADV_HUGEPAGE and, from Linux 6.1 on, MADV_COLLAPSE."""


def prefer_huge_pages(tensor: torch.Tensor) -> None:
    """Ask the kernel to back the memory of a CPU tensor with huge pages; no value changes.

    Only pages that lie in it whole, so it takes no memory. Where the kernel has no such pages, or
    does not give them, nothing happens.
    """
    if not sys.platform.startswith("linux") or tensor.device.type != "cpu":
        return
    begin = -(-tensor.data_ptr() // _PAGE) * _PAGE
    nbytes = (tensor.data_ptr() + tensor.nbytes) // _PAGE * _PAGE - begin
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if nbytes > 0 and madvise is not None:
        for advice in (_ADVISE, _COLLAPSE):
            madvise(ctypes.c_void_p(begin), ctypes.c_size_t(nbytes), ctypes.c_int(advice))
