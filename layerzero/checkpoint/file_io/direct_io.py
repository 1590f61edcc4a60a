"""Direct I/O: reading and writing files without the page cache (O_DIRECT).

Buffered I/O copies every byte, page by page: on fast disks that takes longer than the disk, and on
busy processors much longer. With O_DIRECT the disk moves whole blocks itself, if memory and file
have the same alignment: what is read lies in memory as in the file (aligned_memory.py), what is
written is first copied into an aligned block. Buffered I/O remains for small amounts, for pages
that are not written as a whole, for what is cached already, and where the file system refuses
O_DIRECT.

Note [Whole pages first]
    Buffered I/O queues behind direct I/O: reads in the device queue, writes on the inode lock,
    which also drains direct writes in flight. So where a part ends inside a page, a reader reads
    the whole page directly, into memory beside the part that is aligned like the file, and a writer
    keeps the ends of parts until everything else is written.
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

PAGE_NBYTES = 4096
"""What memory and file are aligned to: a multiple of what disks ask for."""
_MIN_NBYTES = 256 << 10
"""Of a transfer past the cache; for a smaller one the system does more by itself."""
_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)
"""How a file system tells that it cannot do that."""


class FileReader:
    """One file, for several threads at once; a context manager."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDONLY)
        self._direct = self._probe = None
        if hasattr(os, "O_DIRECT") and hasattr(os, "RWF_NOWAIT"):  # Linux
            with contextlib.suppress(OSError):  # some file systems have no such reads
                self._direct = os.open(path, os.O_RDONLY | os.O_DIRECT)
                self._probe = os.open(path, os.O_RDONLY)
                # A probe asks for one page and shall not bring in its neighbours.
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
        """Fill `views`, one after the other, with the bytes from `offset` on.

        Args:
            spare: how many bytes before the first view, and behind the last, also lie in memory as
                in the file: reads may fill them. See Note [Whole pages first].

        Raises:
            OSError: also where the file ends before.
        """
        views = _rest_of(views, 0)
        nbytes = sum(map(len, views))
        if self._direct is None or nbytes < _MIN_NBYTES or not _is_one(views, offset):
            _read_all(self._file, views, offset)
            return
        before, behind = offset % PAGE_NBYTES, -(offset + nbytes) % PAGE_NBYTES
        # What is read past the cache, counted from `offset`.
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
        """Read whole pages past the cache, of which the file has at least the first `needed` bytes.

        False: that is refused here, or not worth it.
        """
        if self._direct is None or self._is_cached(offset):
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
        except OSError:  # it is not, or this file system cannot tell
            return False


class FileWriter:
    """One file that exists, for several threads at once; a context manager.

    What was written is on the disk when the context ends without an error.
    """

    def __init__(self, path: Path, most_nbytes: int) -> None:
        """`most_nbytes`: of one write."""
        self._file = os.open(path, os.O_WRONLY)
        self._direct = None
        if hasattr(os, "O_DIRECT"):
            with contextlib.suppress(OSError):  # some file systems have no such writes
                self._direct = os.open(path, os.O_WRONLY | os.O_DIRECT)
        self._most_nbytes = most_nbytes
        self._of_thread = threading.local()
        self._ends: list[tuple[list[memoryview], int]] = []

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(self, exception: type[BaseException] | None, *rest: object) -> None:
        try:
            if exception is None:
                for views, offset in self._ends:
                    _write_all(self._file, views, offset)
                os.fsync(self._file)
        finally:
            os.close(self._file)
            if self._direct is not None:
                os.close(self._direct)

    def write(self, views: Sequence[memoryview], offset: int) -> None:
        """Write `views`, one after the other, from `offset` on.

        Their memory must stay as it is until the context ends: see Note [Whole pages first].

        Raises:
            OSError: the disk is full, and so on.
        """
        views = _rest_of(views, 0)
        nbytes = sum(map(len, views))
        head = -offset % PAGE_NBYTES
        tail = nbytes - (offset + nbytes) % PAGE_NBYTES
        if self._direct is not None and tail - head >= _MIN_NBYTES:
            rest = _rest_of(views, head)
            if self._write_direct(rest, tail - head, offset + head):
                self._ends.append((_first(views, head), offset))
                self._ends.append((_rest_of(rest, tail - head), offset + tail))
                return
        self._write_cached(views, offset)

    def _write_direct(self, views: Sequence[memoryview], nbytes: int, offset: int) -> bool:
        assert self._direct is not None
        if not hasattr(self._of_thread, "block"):
            self._of_thread.block = pages(self._most_nbytes)
        block: torch.Tensor = self._of_thread.block
        end = 0
        for view in views:
            part = min(len(view), nbytes - end)
            if part:  # without the interpreter's lock
                ctypes.memmove(block.data_ptr() + end, _address(view), part)
            end += part
        try:
            _write_all(self._direct, [bytes_of(block)[:nbytes]], offset)
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise
            return False
        return True

    def _write_cached(self, views: Sequence[memoryview], offset: int) -> None:
        _write_all(self._file, views, offset)
        # Begin to bring it to the disk now, beside what follows, and not all at the end; nor
        # should a checkpoint push other files out of the cache.
        with contextlib.suppress(OSError, AttributeError):  # not every system takes advice
            os.posix_fadvise(self._file, offset, sum(map(len, views)), os.POSIX_FADV_DONTNEED)


def _read_all(
    descriptor: int, views: Sequence[memoryview], offset: int, needed: int | None = None
) -> None:
    """Fill `views` with what is at `offset`: one call, or more where the system gave less.

    Args:
        needed: so many bytes are enough; None: all.

    Raises:
        OSError: also where the file ends before.
    """
    if needed is None:
        needed = sum(map(len, views))
    while needed > 0:
        moved = os.preadv(descriptor, views, offset)
        if moved == 0:
            raise OSError(f"ends at byte {offset}, shorter than it was a moment ago")
        offset += moved
        needed -= moved
        views = _rest_of(views, moved)


def _write_all(descriptor: int, views: Sequence[memoryview], offset: int) -> None:
    """One call, or more where the system took less."""
    while views:
        moved = os.pwritev(descriptor, views, offset)
        offset += moved
        views = _rest_of(views, moved)


def _rest_of(views: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """What follows the first `nbytes` of all; nothing that is empty."""
    rest = [view for view in views if len(view)]
    while rest and nbytes >= len(rest[0]):
        nbytes -= len(rest.pop(0))
    if rest and nbytes:
        rest[0] = rest[0][nbytes:]
    return rest


def _first(views: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """The first `nbytes` of all."""
    found = []
    for view in views:
        if nbytes:
            found.append(view[:nbytes])
            nbytes -= len(found[-1])
    return found


def pages(nbytes: int) -> torch.Tensor:
    """Memory that begins at a page's begin: [nbytes] uint8, on large pages if the system has them.

    On those, touching memory for the first time, which is as slow as reading it from a disk,
    happens 512 times less often.
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
    """Whether views follow each other in memory, and pages of it are those of a file."""
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
