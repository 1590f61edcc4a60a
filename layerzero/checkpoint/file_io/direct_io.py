"""Direct I/O: reads and writes files past the page cache (O_DIRECT).

Buffered I/O copies every byte through the page cache, which takes longer than a fast disk, and much
longer on busy processors. With O_DIRECT the disk transfers whole blocks itself, if memory and file
have the same alignment: reads go to memory laid out like the file (aligned_memory.py), writes are
first copied into an aligned block, and checksummed in the same pass. Buffered I/O is still used for
small amounts, for partial pages, for data that is cached already, and where the file system refuses
O_DIRECT.

Note [Whole pages first]
    Buffered I/O queues behind direct I/O: reads in the device queue, writes on the inode lock,
    which also drains direct writes in flight. So if a part ends inside a page, a reader reads the
    whole page directly, into spare memory around the part. A writer keeps partial pages back until
    everything else is written.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from layerzero.checkpoint.format.crc import copy_crc32, crc32

PAGE_NBYTES = 4096
"""Alignment of memory and file offsets: a multiple of the block sizes that disks require."""
_MIN_NBYTES = 256 << 10
"""Smallest direct transfer; smaller ones are left to the page cache."""
_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)
"""Errors by which a file system refuses O_DIRECT."""


class FileReader:
    """Reads one file, from several threads at once; a context manager."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDONLY)
        self._direct = self._probe = None
        if hasattr(os, "O_DIRECT") and hasattr(os, "RWF_NOWAIT"):  # Linux
            with contextlib.suppress(OSError):  # some file systems have no such reads
                self._direct = os.open(path, os.O_RDONLY | os.O_DIRECT)
                self._probe = os.open(path, os.O_RDONLY)
                # No readahead: a probe tests one page, and must not load its neighbours.
                os.posix_fadvise(self._probe, 0, 0, os.POSIX_FADV_RANDOM)

    def __enter__(self) -> FileReader:
        return self

    def __exit__(self, *exception: object) -> None:
        for descriptor in (self._file, self._direct, self._probe):
            if descriptor is not None:
                os.close(descriptor)

    def read(
        self, views: Sequence[memoryview], offset: int, spare: tuple[int, int] = (0, 0)
    ) -> None:
        """Fill `views` in order with the bytes of the file from `offset` on. Blocks.

        Args:
            spare: number of bytes in memory before the first view and behind the last that are laid
                out like the file and may be overwritten. See Note [Whole pages first].

        Raises:
            OSError: a read failed, or the file is too short.
        """
        views = _rest_of(views, 0)
        nbytes = sum(map(len, views))
        if self._direct is None or nbytes < _MIN_NBYTES or not _is_one(views, offset):
            _read_all(self._file, views, offset)
            return
        before, behind = offset % PAGE_NBYTES, -(offset + nbytes) % PAGE_NBYTES
        # [start, stop), relative to `offset`, is read directly. It grows to whole pages if there is
        # spare memory, and shrinks to whole pages otherwise.
        start = -before if before <= spare[0] else -offset % PAGE_NBYTES
        stop = nbytes + behind
        if behind > spare[1]:
            stop -= PAGE_NBYTES
        memory = _memory(_address(views[0]) + start, stop - start)
        if not self._read_direct(memory, offset + start, min(nbytes, stop) - start):
            start = stop = nbytes
        whole = _memory(_address(views[0]), nbytes)
        _read_all(self._file, _rest_of([whole[: max(start, 0)]], 0), offset)
        _read_all(self._file, _rest_of([whole[stop:]], 0), offset + stop)

    def _read_direct(self, view: memoryview, offset: int, needed: int) -> bool:
        """Read whole pages with O_DIRECT; the file has at least the first `needed` bytes of them.

        Returns:
            False if nothing was read, because the file system refuses O_DIRECT, or the file is
            cached here, so that a buffered read is faster.
        """
        # Asks about the middle: whoever read the file's header has loaded the pages behind it.
        if self._direct is None or self._is_cached(offset + needed // 2):
            return False
        try:
            _read_all(self._direct, [view], offset, needed)
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise
            return False
        return True

    def _is_cached(self, offset: int) -> bool:
        if self._probe is None:
            return True
        try:
            return os.preadv(self._probe, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
        except OSError:  # Not cached (EAGAIN), or the file system does not support RWF_NOWAIT.
            return False


class FileWriter:
    """Writes one existing file, from several threads at once; a context manager.

    The data is on the disk (fsync) when the context ends without an error.
    """

    def __init__(self, path: Path, most_nbytes: int) -> None:
        """`most_nbytes`: largest size of one write, with what is before it in its first page."""
        self._file = os.open(path, os.O_WRONLY)
        self._direct = None
        if hasattr(os, "O_DIRECT"):
            with contextlib.suppress(OSError):  # some file systems have no such writes
                self._direct = os.open(path, os.O_WRONLY | os.O_DIRECT)
        self._most_nbytes = most_nbytes
        self._of_thread = threading.local()
        self._ends: list[tuple[memoryview, int]] = []

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(self, exception: type[BaseException] | None, *rest: object) -> None:
        try:
            if exception is None:
                for view, offset in self._ends:
                    _write_all(self._file, [view], offset)
                os.fsync(self._file)
        finally:
            os.close(self._file)
            if self._direct is not None:
                os.close(self._direct)

    def write(self, views: Sequence[memoryview], offset: int) -> list[int]:
        """Write `views` in order from `offset` on; returns the CRC-32 of each. Blocks.

        Raises:
            OSError: a write failed, for example because the disk is full.
        """
        nbytes = sum(map(len, views))
        head = -offset % PAGE_NBYTES
        tail = nbytes - (offset + nbytes) % PAGE_NBYTES
        if self._direct is None or tail - head < _MIN_NBYTES:
            self._write_cached(_rest_of(views, 0), offset)
            return [crc32(view) for view in views]
        copied, crcs = self._copy(views, offset)
        if self._write_direct(copied[head:tail], offset + head):
            self._keep(copied[:head], offset)
            self._keep(copied[tail:], offset + tail)
        else:
            self._write_cached([copied], offset)
        return crcs

    def _copy(self, views: Sequence[memoryview], offset: int) -> tuple[memoryview, list[int]]:
        """Copy `views` to memory aligned like the file, where they are valid until the thread
        copies again; and their CRC-32, in the same pass."""
        if not hasattr(self._of_thread, "block"):
            self._of_thread.block = bytes_of(pages(self._most_nbytes))
        begin = end = offset % PAGE_NBYTES
        crcs = []
        for view in views:
            crcs.append(copy_crc32(self._of_thread.block[end : end + len(view)], view))
            end += len(view)
        return self._of_thread.block[begin:end], crcs

    def _keep(self, view: memoryview, offset: int) -> None:
        """Copy less than a page, to be written when the context ends; Note [Whole pages first]."""
        if view:
            self._ends.append((memoryview(bytes(view)), offset))

    def _write_direct(self, view: memoryview, offset: int) -> bool:
        """Write whole pages; returns False if the file system refuses O_DIRECT."""
        assert self._direct is not None
        try:
            _write_all(self._direct, [view], offset)
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise
            return False
        return True

    def _write_cached(self, views: Sequence[memoryview], offset: int) -> None:
        _write_all(self._file, views, offset)
        # Starts writeback now instead of at the final fsync, and keeps a checkpoint from evicting
        # other files from the page cache.
        with contextlib.suppress(OSError, AttributeError):  # Not every system has fadvise.
            os.posix_fadvise(self._file, offset, sum(map(len, views)), os.POSIX_FADV_DONTNEED)


def _read_all(
    descriptor: int, views: Sequence[memoryview], offset: int, needed: int | None = None
) -> None:
    """Fill `views` with the bytes at `offset`; loops over short reads.

    Args:
        needed: stop after at least this many bytes; None: all.

    Raises:
        OSError: a read failed, or the file is too short.
    """
    if needed is None:
        needed = sum(map(len, views))
    while needed > 0:
        moved = os.preadv(descriptor, views, offset)
        if moved == 0:
            raise OSError(f"the file now ends at byte {offset}: it was truncated while it was read")
        offset += moved
        needed -= moved
        views = _rest_of(views, moved)


def _write_all(descriptor: int, views: Sequence[memoryview], offset: int) -> None:
    """Write `views` at `offset`; loops over short writes."""
    while views:
        moved = os.pwritev(descriptor, views, offset)
        offset += moved
        views = _rest_of(views, moved)


def _rest_of(views: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """`views` without their first `nbytes` and without empty views."""
    rest = [view for view in views if len(view)]
    while rest and nbytes >= len(rest[0]):
        nbytes -= len(rest.pop(0))
    if rest and nbytes:
        rest[0] = rest[0][nbytes:]
    return rest


def pages(nbytes: int) -> torch.Tensor:
    """Page-aligned memory: [nbytes] uint8, on huge pages if the system has them.

    Page faults at first touch cost as much as reading from a disk; huge pages have 512 times fewer.
    """
    if not hasattr(mmap, "MAP_ANONYMOUS"):  # Windows
        memory = torch.empty(nbytes + PAGE_NBYTES, dtype=torch.uint8)
        shift = -memory.data_ptr() % PAGE_NBYTES
        return memory[shift : shift + nbytes]
    mapped = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapped, dtype=torch.uint8)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous 1-D tensor on the CPU."""
    data: Any = tensor.view(torch.uint8).numpy()
    return memoryview(data)


def _is_one(views: Sequence[memoryview], offset: int) -> bool:
    """Whether views are adjacent in memory, and addresses equal file offsets modulo the page."""
    end = _address(views[0])
    if (end - offset) % PAGE_NBYTES:
        return False
    for view in views:
        if _address(view) != end:
            return False
        end += len(view)
    return True


def _memory(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
