"""Reading and writing files past the page cache.

A read through the page cache finds a page for every 4 KB, waits for the disk, and copies; a write
copies, and the system brings it to the disk when it likes. On fast disks that takes longer than the
disk, and on busy processors much longer. The disk can move whole blocks by itself, if memory and
file are aligned alike: what is read lies in memory as in the file (memory.py), what is written is
copied into an aligned block first. Through the cache goes what does not fill a page, what the cache
holds already, and everything where the file system refuses.
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

    def read(self, views: Sequence[memoryview], offset: int) -> None:
        """Fill `views`, one after the other, with the bytes from `offset` on.

        Raises:
            OSError: also where the file ends before.
        """
        views = _rest_of(views, 0)
        whole = self._aligned(views, offset)
        if whole is None:
            _read_all(self._file, views, offset)
            return
        head = -offset % PAGE_NBYTES
        tail = len(whole) - (offset + len(whole)) % PAGE_NBYTES
        if head:
            _read_all(self._file, [whole[:head]], offset)
        if not self._read_direct(whole[head:tail], offset + head):
            _read_all(self._file, [whole[head:tail]], offset + head)
        if tail < len(whole):
            _read_all(self._file, [whole[tail:]], offset + tail)

    def _aligned(self, views: Sequence[memoryview], offset: int) -> memoryview | None:
        """All views as one, if they follow each other in memory and are aligned as the file is."""
        if self._direct is None or sum(map(len, views)) < _MIN_NBYTES:
            return None
        begin = end = _address(views[0])
        if (begin - offset) % PAGE_NBYTES:
            return None
        for view in views:
            if _address(view) != end:
                return None
            end += len(view)
        memory = (ctypes.c_char * (end - begin)).from_address(begin)
        return memoryview(memory).cast("B")

    def _read_direct(self, view: memoryview, offset: int) -> bool:
        """Read whole pages past the cache; False: that is refused here, or not worth it."""
        if self._direct is None or self._is_cached(offset):
            return False
        try:
            _read_all(self._direct, [view], offset)
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

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(self, exception: type[BaseException] | None, *rest: object) -> None:
        try:
            if exception is None:
                os.fsync(self._file)
        finally:
            os.close(self._file)
            if self._direct is not None:
                os.close(self._direct)

    def write(self, views: Sequence[memoryview], offset: int) -> None:
        """Write `views`, one after the other, from `offset` on.

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
                self._write_cached(views, head, offset)
                self._write_cached(_rest_of(rest, tail - head), nbytes - tail, offset + tail)
                return
        self._write_cached(views, nbytes, offset)

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

    def _write_cached(self, views: Sequence[memoryview], nbytes: int, offset: int) -> None:
        if not nbytes:
            return
        _write_all(self._file, _first(views, nbytes), offset)
        # Begin to bring it to the disk now, beside what follows, and not all at the end; nor
        # should a checkpoint push other files out of the cache.
        with contextlib.suppress(OSError, AttributeError):  # not every system takes advice
            os.posix_fadvise(self._file, offset, nbytes, os.POSIX_FADV_DONTNEED)


def _read_all(descriptor: int, views: Sequence[memoryview], offset: int) -> None:
    """Fill `views` with what is at `offset`: one call, or more where the system gave less.

    Raises:
        OSError: also where the file ends before.
    """
    while views:
        moved = os.preadv(descriptor, views, offset)
        if moved == 0:
            raise OSError(f"ends at byte {offset}, shorter than it was a moment ago")
        offset += moved
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


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
