"""Direct I/O: reads and writes files past the page cache (O_DIRECT).

Buffered I/O copies every byte through the page cache, which takes longer than a fast disk, and much
longer on busy processors. With O_DIRECT the disk transfers whole blocks itself, if memory and file
have the same alignment. Buffered I/O is still used for small amounts, for partial pages, for data
that is cached already, and where the file system refuses O_DIRECT.
"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import Any

import torch

from layerzero.flat.buffer import HUGE_PAGE_NBYTES, prefer_huge_pages

PAGE_NBYTES = 4096
"""Alignment of memory and file offsets: a multiple of the block sizes that disks require."""
_MIN_NBYTES = 256 << 10
"""Smallest direct transfer; smaller ones are left to the page cache."""
_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)
"""Errors by which a file system refuses O_DIRECT, or memory that is not aligned."""


class _File:
    def __init__(self, path: Path, flags: int) -> None:
        self._descriptors: list[int] = []
        self._file = self._open(path, flags)
        self._direct: int | None = None
        if hasattr(os, "O_DIRECT"):
            with contextlib.suppress(OSError):  # Some file systems have no direct I/O.
                self._direct = self._open(path, flags | os.O_DIRECT)

    def _open(self, path: Path, flags: int) -> int:
        self._descriptors.append(os.open(path, flags))
        return self._descriptors[-1]

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())


class FileReader(_File):
    """Reads one file, from several threads at once."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, os.O_RDONLY)
        self._probe = None
        if self._direct is not None and hasattr(os, "RWF_NOWAIT"):
            self._probe = self._open(path, os.O_RDONLY)
            # No readahead: a probe tests one page, and must not load its neighbours.
            os.posix_fadvise(self._probe, 0, 0, os.POSIX_FADV_RANDOM)

    def read(self, view: memoryview, offset: int, needed: int) -> None:
        """Fill `view` with the bytes of the file from `offset` on. Blocks.

        Args:
            view: where it holds whole pages at addresses like their offsets, they are read
                directly.
            needed: number of bytes that the file must have; the rest of `view` may stay as it is.

        Raises:
            OSError: a read failed, or the file is too short.
        """
        is_whole = not (offset % PAGE_NBYTES or len(view) % PAGE_NBYTES)
        # Asks about the middle: whoever read the file's header has loaded the pages behind it.
        if is_whole and len(view) >= _MIN_NBYTES and not self._is_cached(offset + needed // 2):
            assert self._direct is not None, "else there is no probe"
            try:
                _read_all(self._direct, view, offset, needed)
                return
            except OSError as error:
                if error.errno not in _REFUSALS:
                    raise
        _read_all(self._file, view, offset, needed)

    def _is_cached(self, offset: int) -> bool:
        """Whether a buffered read is faster, or all there is."""
        if self._probe is None:
            return True
        try:
            return os.preadv(self._probe, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
        except OSError:  # Not cached (EAGAIN), or the file system does not support RWF_NOWAIT.
            return False

    def finish(self) -> None:
        self.close()


class FileWriter(_File):
    """Writes one existing file, from several threads at once.

    Note [Whole pages first]
        Buffered writes queue behind direct ones for the inode lock, and drain those in flight. So
        parts of pages are kept back until everything else is written.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, os.O_WRONLY)
        self._ends: list[tuple[bytes, int]] = []

    def write(self, view: memoryview, offset: int) -> None:
        """Write `view` at `offset`; at the latest when `finish` returns it is on the disk. Blocks.

        Args:
            view: whole pages in it are written directly if their addresses are like their offsets.

        Raises:
            OSError: a write failed, for example because the disk is full.
        """
        head = -offset % PAGE_NBYTES
        tail = len(view) - (offset + len(view)) % PAGE_NBYTES
        if self._direct is not None and tail - head >= _MIN_NBYTES:
            try:
                _write_all(self._direct, view[head:tail], offset + head)
            except OSError as error:
                if error.errno not in _REFUSALS:
                    raise
            else:
                self._ends += [(bytes(view[:head]), offset), (bytes(view[tail:]), offset + tail)]
                return
        _write_all(self._file, view, offset)
        # Starts writeback now instead of at the final fsync, and keeps a checkpoint from evicting
        # other files from the page cache.
        with contextlib.suppress(OSError, AttributeError):  # Not every system has fadvise.
            os.posix_fadvise(self._file, offset, len(view), os.POSIX_FADV_DONTNEED)

    def finish(self) -> None:
        """Write what was kept back, fsync and close the file."""
        for data, offset in self._ends:
            _write_all(self._file, memoryview(data), offset)
        os.fsync(self._file)
        self.close()


def _read_all(descriptor: int, view: memoryview, offset: int, needed: int) -> None:
    """Fill `view` with the bytes at `offset`, of which the file has at least `needed`."""
    done = 0
    while done < needed:  # A read may return less than it was asked for.
        moved = os.preadv(descriptor, [view[done:]], offset + done)
        if moved == 0:
            end = offset + done
            raise OSError(f"the file now ends at byte {end}: it was truncated while it was read")
        done += moved


def _write_all(descriptor: int, view: memoryview, offset: int) -> None:
    while view:
        moved = os.pwritev(descriptor, [view], offset)
        offset += moved
        view = view[moved:]


def pages(nbytes: int) -> torch.Tensor:
    """Page-aligned memory: [nbytes] uint8, on huge pages if the system has them.

    A disk moves more bytes per request to and from huge pages, which are contiguous.
    """
    memory = torch.empty(nbytes + HUGE_PAGE_NBYTES, dtype=torch.uint8, device="cpu")
    begin = -memory.data_ptr() % HUGE_PAGE_NBYTES
    memory = memory[begin : begin + nbytes]
    prefer_huge_pages(memory, collapse=False)
    return memory


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous 1-D tensor on the CPU."""
    data: Any = tensor.view(torch.uint8).numpy()
    return memoryview(data)
