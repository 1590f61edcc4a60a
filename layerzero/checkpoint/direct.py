"""Reading a file past the page cache, straight into memory that lies as the file does (memory.py).

A read through the page cache finds a page for every 4 KB, waits for the disk, and copies: on fast
disks that takes longer than the disk. The disk can write to memory by itself, in whole blocks, if
memory and file are aligned alike. Through the cache goes what is not, what the cache holds already,
and everything where the file system refuses.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

PAGE_NBYTES = 4096
"""What memory and file are aligned to: a multiple of what disks ask for."""
_MIN_NBYTES = 256 << 10
"""Of a read past the cache; for a smaller one the system's read-ahead does more."""


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
        whole = self._aligned(views, offset)
        if whole is None:
            read_all(self._file, views, offset)
            return
        head = -offset % PAGE_NBYTES
        tail = len(whole) - (offset + len(whole)) % PAGE_NBYTES
        if head:
            read_all(self._file, [whole[:head]], offset)
        if not self._read_direct(whole[head:tail], offset + head):
            read_all(self._file, [whole[head:tail]], offset + head)
        if tail < len(whole):
            read_all(self._file, [whole[tail:]], offset + tail)

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
            read_all(self._direct, [view], offset)
        except OSError:  # read through the cache, which tells what is the matter
            return False
        return True

    def _is_cached(self, offset: int) -> bool:
        if self._probe is None:
            return True
        try:
            return os.preadv(self._probe, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
        except OSError:  # it is not, or this file system cannot tell
            return False


def read_all(descriptor: int, views: Sequence[memoryview], offset: int) -> None:
    """Fill `views` with what is at `offset`: one call, or more where the system gave less.

    Raises:
        OSError: also where the file ends before.
    """
    while views:
        moved = os.preadv(descriptor, views, offset)
        if moved == 0:
            raise OSError(f"ends at byte {offset}, shorter than it was a moment ago")
        offset += moved
        views = rest_of(views, moved)


def rest_of(views: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """What follows the first `nbytes` of all."""
    rest = list(views)
    while rest and nbytes >= len(rest[0]):
        nbytes -= len(rest.pop(0))
    if rest and nbytes:
        rest[0] = rest[0][nbytes:]
    return rest


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
