"""Moves bytes between this rank's shards and files, and computes the checksum of every shard.

    file       ..aaaaaaaabbbbbbbbbbbbbbb.....cccccc..     a, b, c: shards of this rank
    regions      aaaaaaaabbbbbbbbbbbbbbb     cccccc       adjacent in the file
    batches      aaaaaaa|abbbbbb|bbbbbbb     cccccc       one thread moves each with one call

Batches are cut at pages, for direct I/O, and about equally large: with a few small ones at the end
of each region the disk would wait more often. A thread moves each through a block of memory of its
own, aligned like the file, and computes checksums while it copies between block and shards. Nothing
here is collective.

Note [Past the page cache]
    Buffered I/O copies every byte through the page cache, which takes longer than a fast disk, and
    much longer on busy processors. With O_DIRECT the disk transfers whole blocks itself, if memory
    and file have the same alignment. Buffered I/O is still used for small amounts, for partial
    pages, for data that is cached already, and where the file system refuses O_DIRECT.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from layerzero.checkpoint.format.crc import copy_crc32, crc32, placed
from layerzero.checkpoint.format.inventory import Entry
from layerzero.checkpoint.format.safetensors_file import TensorEntry
from layerzero.flat.host_memory import HostMemory
from layerzero.optim.huge_pages import HUGE_PAGE_NBYTES, prefer_huge_pages

PAGE_NBYTES = 4096
"""Alignment of memory and file offsets: a multiple of the block sizes that disks require."""
_MIN_NBYTES = 256 << 10
"""Smallest direct transfer; smaller ones are left to the page cache."""
_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)
"""Errors by which a file system refuses O_DIRECT, or memory that is not aligned."""
BATCH_NBYTES = 4 << 20
"""Largest batch, so that it is still in the CPU cache when it is moved after being checksummed, or
the other way round."""
_NUM_THREADS = 8


class _File:
    """Opened twice, if the file system allows: see Note [Past the page cache]."""

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

    def finish(self) -> None:
        """Bring to the disk what was written."""

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
        """Write what was kept back, and fsync the file."""
        for data, offset in self._ends:
            _write_all(self._file, memoryview(data), offset)
        os.fsync(self._file)


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


class Transfer(NamedTuple):
    """A shard and the tensor in a file that it is part of."""

    place: TensorEntry
    number: int
    """Number of the tensor, the same on all ranks."""
    entry: Entry


class Tally(NamedTuple):
    """Bytes that one rank moved of a tensor, and their CRC; Note [Checksums add up] in crc.py."""

    number: int
    replica: int
    nbytes: int
    crc: int


class _Part(NamedTuple):
    """Adjacent bytes of a shard and of the file."""

    offset: int
    nbytes: int
    transfer: int
    """Index of the transfer that it is part of."""
    local: int
    """Offset in the shard's bytes."""
    behind: int
    """Bytes of the tensor behind this part."""

    @property
    def end(self) -> int:
        return self.offset + self.nbytes

    def cut(self, nbytes: int) -> tuple[_Part, _Part]:
        """The first `nbytes` and the rest."""
        rest = self.nbytes - nbytes
        head = self._replace(nbytes=nbytes, behind=self.behind + rest)
        tail = (self.offset + nbytes, rest, self.transfer, self.local + nbytes, self.behind)
        return head, _Part(*tail)


_Batch = list[_Part]
"""Adjacent in the file."""


def is_on_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def _parts(transfer: Transfer, index: int) -> Iterator[_Part]:
    place, width = transfer.place, transfer.place.dtype.itemsize
    for run in transfer.entry.runs():
        begin, nbytes = place.begin + run.start * width, run.numel * width
        yield _Part(begin, nbytes, index, run.local * width, place.end - begin - nbytes)


def _regions(parts: Iterable[_Part]) -> Iterator[list[_Part]]:
    region: list[_Part] = []
    for part in sorted(parts):
        if region and region[-1].end != part.offset:
            yield region
            region = []
        region.append(part)
    if region:
        yield region


def _cut(region: Sequence[_Part]) -> Iterator[list[_Part]]:
    begin, end = _rounded(region)
    num_pages = (end - begin) // PAGE_NBYTES
    num_batches = -(-(end - begin) // max(BATCH_NBYTES, PAGE_NBYTES))
    step = -(-num_pages // num_batches) * PAGE_NBYTES
    stop, batch = begin + step, list[_Part]()
    for part in region:
        while part.end > stop:
            head, part = part.cut(stop - part.offset)
            yield [*batch, head]
            batch, stop = [], stop + step
        batch.append(part)
    yield batch


def _rounded(parts: Sequence[_Part]) -> tuple[int, int]:
    """Where adjacent parts begin and end in the file, in whole pages."""
    begin, end = parts[0].offset, parts[-1].end
    return begin - begin % PAGE_NBYTES, end + -end % PAGE_NBYTES


class _Ranges(contextlib.ExitStack[None]):
    """Moves shards in several threads, from `start` on. Inside `with`; the end of that ends the
    threads, too, and closes files."""

    _open_file: Callable[[Path], FileReader | FileWriter]
    _device: torch.device | None = None
    """Where shards are, if not all are on the host."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._transfers: list[Transfer] = []
        self._shards: list[Any] = []
        self._waiting: deque[tuple[Path, list[_Part]]] = deque()
        """Files that no thread works on yet."""
        self._begun: deque[tuple[Path, FileReader | FileWriter, Iterable[list[int]]]] = deque()
        self._parts: list[_Part] = []
        self._crcs: list[int] = []
        self._of_thread = threading.local()
        self._pool = ThreadPoolExecutor(_NUM_THREADS, "layerzero-transfer")
        self._files = self.enter_context(contextlib.ExitStack())
        self.callback(self._pool.shutdown, cancel_futures=True)  # Before files are closed.

    def start(self, transfers: Sequence[Transfer]) -> None:
        """Begin to move these, which are in other files than those before. Does not block.

        Raises:
            OSError: a file cannot be opened.
        """
        by_file: dict[str, list[_Part]] = {}
        for index, transfer in enumerate(transfers, len(self._transfers)):
            by_file.setdefault(transfer.place.file, []).extend(_parts(transfer, index))
            tensor = transfer.entry.tensor
            on_host = is_on_host(tensor)
            self._shards.append(bytes_of(tensor) if on_host else tensor.view(torch.uint8))
            self._device = self._device if on_host else tensor.device
        self._transfers += transfers
        self._waiting += [(self._folder / name, parts) for name, parts in by_file.items()]
        self._begin_next()

    def finish(self) -> list[Tally]:
        """Block until all is moved; return a tally for each transfer, in the order of `start`.

        Raises:
            OSError: a file cannot be opened, read or written, or is too short.
        """
        while self._begun:
            path, file, crcs = self._begun.popleft()
            with _naming(path):
                self._crcs.extend(itertools.chain.from_iterable(crcs))
                file.finish()
            file.close()
            self._begin_next()
        return _tallies(self._transfers, self._parts, self._crcs)

    def _begin_next(self) -> None:
        # The disk works on the next batches, of the next file too, while one is copied and
        # checksummed. Of a checkpoint of many files few are open at a time.
        while self._waiting and len(self._begun) < 2:
            path, parts = self._waiting.popleft()
            batches = [batch for region in _regions(parts) for batch in _cut(region)]
            with _naming(path):
                file = self._open_file(path)
            self._files.callback(file.close)
            crcs = self._pool.map(self._run, itertools.repeat(file), batches)
            self._begun.append((path, file, crcs))
            self._parts.extend(itertools.chain.from_iterable(batches))

    def _run(self, file: FileReader | FileWriter, batch: _Batch) -> list[int]:
        if not hasattr(self._of_thread, "block"):
            # For a batch with what is before it in its first page.
            nbytes, device = max(BATCH_NBYTES, PAGE_NBYTES), self._device
            self._of_thread.block = (
                pages(nbytes)
                if device is None
                else HostMemory(pin_memory=True, device=device).lasting(nbytes, torch.uint8)
            )
        return self._move(file, self._of_thread.block, batch)

    def _move(self, file: Any, block: torch.Tensor, batch: _Batch) -> list[int]:
        """Returns the CRC of each part."""
        raise NotImplementedError


class ReadRanges(_Ranges):
    """Reads shards, which are on the host."""

    _open_file = FileReader

    def _move(self, file: FileReader, block: torch.Tensor, batch: _Batch) -> list[int]:
        begin, end = _rounded(batch)
        data = bytes_of(block[: end - begin])
        file.read(data, begin, batch[-1].end - begin)
        return [
            copy_crc32(
                self._shards[part.transfer][part.local : part.local + part.nbytes],
                data[part.offset - begin : part.end - begin],
            )
            for part in batch
        ]


class WriteRanges(_Ranges):
    """Writes shards into existing files, and fsyncs them.

    The values of shards on a device must be there. Every thread copies them to the host a batch at
    a time.
    """

    _open_file = FileWriter

    def _move(self, file: FileWriter, block: torch.Tensor, batch: _Batch) -> list[int]:
        begin = end = batch[0].offset % PAGE_NBYTES
        crcs = []
        for part in batch:
            data = self._shards[part.transfer][part.local : part.local + part.nbytes]
            copy = block[end : end + part.nbytes]
            end += part.nbytes
            if isinstance(data, memoryview):
                crcs.append(copy_crc32(bytes_of(copy), data))
            else:
                copy.copy_(data)  # Waits for it.
                crcs.append(crc32(bytes_of(copy)))
        file.write(bytes_of(block[begin:end]), batch[0].offset)
        return crcs


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OSError(f"{path}: {error}") from error


def _tallies(
    transfers: Sequence[Transfer], parts: Sequence[_Part], crcs: Sequence[int]
) -> list[Tally]:
    crc_of = np.zeros(len(transfers), dtype=np.uint32)
    nbytes_of = np.zeros(len(transfers), dtype=np.int64)
    owners = np.array([part.transfer for part in parts], dtype=np.int64)
    np.bitwise_xor.at(crc_of, owners, placed(crcs, [part.behind for part in parts]))
    np.add.at(nbytes_of, owners, [part.nbytes for part in parts])
    return [
        Tally(transfer.number, transfer.entry.replica, int(nbytes), int(crc))
        for transfer, nbytes, crc in zip(transfers, nbytes_of, crc_of, strict=True)
    ]


def sum_tallies(by_rank: Iterable[Iterable[Tally]]) -> dict[tuple[int, int], tuple[int, int]]:
    """(bytes, CRC) of each (tensor, replica), combined from the tallies of all ranks."""
    found: dict[tuple[int, int], tuple[int, int]] = {}
    for number, replica, nbytes, crc in itertools.chain.from_iterable(by_rank):
        old = found.get((number, replica), (0, 0))
        found[number, replica] = old[0] + nbytes, old[1] ^ crc
    return found
