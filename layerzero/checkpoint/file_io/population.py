"""Has the kernel give new memory its pages ahead of the reads into it.

A read into pages that are not there yet has to wait for them: the kernel finds and zeroes them, and
on a virtual machine the host may have to give the memory first. With one thread that asks for them
(MADV_POPULATE_WRITE, Linux 5.14) the disk is kept busy meanwhile. It changes no value, so it does
no harm where a read was faster.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from layerzero.checkpoint.file_io.batches import Transfer
from layerzero.checkpoint.file_io.direct_io import PAGE_NBYTES

_POPULATE_WRITE = 23
_STEP_NBYTES = 4 << 20
"""Bytes asked for at a time; after each the thread looks whether it should stop."""
_MIN_NBYTES = 256 << 10
"""Smaller parts lie in memory that is mostly there."""


@contextlib.contextmanager
def populating(transfers: Sequence[Transfer], lead_nbytes: int) -> Iterator[None]:
    """Populate the memory of `transfers`, in the order of `read_ranges`, while the context lasts.

    Does nothing where the system cannot.

    Args:
        transfers: their tensors are on the CPU.
        lead_nbytes: number of bytes at the beginning to leave out, whose reads begin at once.
    """
    madvise = _madvise()
    steps = list(_steps(transfers, lead_nbytes)) if madvise is not None else []
    stopped = threading.Event()

    def populate() -> None:
        for address, nbytes in steps:
            # An old kernel, or no memory: then the reads take it, or fail.
            if stopped.is_set() or madvise(address, nbytes, _POPULATE_WRITE):
                return

    thread = threading.Thread(target=populate, name="layerzero-populate")
    if steps:
        thread.start()
    try:
        yield
    finally:
        stopped.set()
        if steps:
            thread.join()


def _steps(transfers: Sequence[Transfer], lead_nbytes: int) -> Iterator[tuple[int, int]]:
    """(address, bytes) of whole pages."""
    for begin, end in _regions(transfers):
        skipped = min(lead_nbytes, end - begin)
        lead_nbytes -= skipped
        first = (begin + skipped) // PAGE_NBYTES * PAGE_NBYTES
        last = -(-end // PAGE_NBYTES) * PAGE_NBYTES
        if skipped < end - begin and end - begin >= _MIN_NBYTES:
            for address in range(first, last, _STEP_NBYTES):
                yield address, min(_STEP_NBYTES, last - address)


def _regions(transfers: Sequence[Transfer]) -> list[tuple[int, int]]:
    """[begin, end) of adjacent memory, in the order of reading: by file, then by offset."""
    files = {name: number for number, name in enumerate(dict.fromkeys(t.file for t in transfers))}

    def place(transfer: Transfer) -> tuple[int, int]:
        first = next(transfer.entry.runs(), None)
        start = 0 if first is None else first.start
        return files[transfer.file], transfer.place.begin + start * transfer.place.dtype.itemsize

    regions: list[tuple[int, int]] = []
    for transfer in sorted(transfers, key=place):
        tensor = transfer.entry.tensor
        begin = tensor.data_ptr()
        if regions and regions[-1][1] == begin:
            begin = regions.pop()[0]
        regions.append((begin, tensor.data_ptr() + tensor.nbytes))
    return regions


def _madvise() -> Any:
    """madvise(2), which runs without the GIL; None: not Linux."""
    if not sys.platform.startswith("linux"):
        return None
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is not None:
        madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return madvise
