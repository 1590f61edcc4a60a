"""Moves bytes between this rank's shards and files, and computes the checksum of every shard.

    file       ..aaaaaaaabbbbbbbbbbbbbbb.....cccccc..     a, b, c: shards of this rank
    regions      aaaaaaaabbbbbbbbbbbbbbb     cccccc       adjacent in the file
    batches      aaaaaaa|abbbbbb|bbbbbbb     cccccc       one thread moves each with one call

Batches are cut at pages, for direct I/O, and about equally large: with a few small ones at the end
of each region the disk would wait more often. A thread moves each through a block of memory of its
own, aligned like the file, and computes checksums while it copies between block and shards. Nothing
here is collective.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from layerzero.checkpoint.file_io.direct_io import (
    PAGE_NBYTES,
    FileReader,
    FileWriter,
    bytes_of,
    pages,
)
from layerzero.checkpoint.format.crc import copy_crc32, crc32, placed
from layerzero.checkpoint.format.inventory import Entry
from layerzero.checkpoint.format.safetensors_file import TensorEntry
from layerzero.flat.host_memory import HostMemory

BATCH_NBYTES = 8 << 20
"""Largest batch, so that it is still in the CPU cache when it is moved after being checksummed, or
the other way round."""
_NUM_THREADS = 4
File = TypeVar("File", FileReader, FileWriter)


class Transfer(NamedTuple):
    """A shard and the tensor in a file that it is part of."""

    file: str
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


def write_ranges(folder: Path, transfers: Sequence[Transfer]) -> list[Tally]:
    """Write shards into existing files, and fsync them. Blocks.

    The values of shards on a device must be there. Every thread copies them to the host a batch at
    a time.

    Raises:
        OSError: a write failed.
    """
    tensors = [each.entry.tensor for each in transfers]
    shards = [bytes_of(each) if is_on_host(each) else each.view(torch.uint8) for each in tensors]
    devices = {each.device for each in shards if isinstance(each, torch.Tensor)}

    def write(file: FileWriter, block: torch.Tensor, batch: _Batch) -> list[int]:
        begin = end = batch[0].offset % PAGE_NBYTES
        crcs = []
        for part in batch:
            data = shards[part.transfer][part.local : part.local + part.nbytes]
            copy = block[end : end + part.nbytes]
            end += part.nbytes
            if isinstance(data, memoryview):
                crcs.append(copy_crc32(bytes_of(copy), data))
            else:
                copy.copy_(data)  # Waits for it.
                crcs.append(crc32(bytes_of(copy)))
        file.write(bytes_of(block[begin:end]), batch[0].offset)
        return crcs

    return _move(folder, transfers, devices, FileWriter, write)


def _block(devices: set[torch.device]) -> torch.Tensor:
    """Memory of one thread for a batch with what is before it in its first page."""
    nbytes = max(BATCH_NBYTES, PAGE_NBYTES)
    for device in devices:
        return HostMemory(pin_memory=True, device=device).lasting(nbytes, torch.uint8)
    return pages(nbytes)


def is_on_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def read_ranges(folder: Path, transfers: Sequence[Transfer]) -> list[Tally]:
    """Read shards, which are on the host. Blocks.

    Raises:
        OSError: a read failed, or a file is too short.
    """
    shards = [bytes_of(each.entry.tensor) for each in transfers]

    def read(file: FileReader, block: torch.Tensor, batch: _Batch) -> list[int]:
        begin, end = _rounded(batch)
        data = bytes_of(block[: end - begin])
        file.read(data, begin, batch[-1].end - begin)
        return [
            copy_crc32(
                shards[part.transfer][part.local : part.local + part.nbytes],
                data[part.offset - begin : part.end - begin],
            )
            for part in batch
        ]

    return _move(folder, transfers, set(), FileReader, read)


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


def _move(
    folder: Path,
    transfers: Sequence[Transfer],
    devices: set[torch.device],
    open_file: Callable[[Path], File],
    move: Callable[[File, torch.Tensor, _Batch], list[int]],
) -> list[Tally]:
    """Move all batches in several threads; `move` returns the CRC of each part."""
    by_file: dict[str, list[_Part]] = {}
    for index, transfer in enumerate(transfers):
        by_file.setdefault(transfer.file, []).extend(_parts(transfer, index))
    crcs: list[int] = []
    parts: list[_Part] = []
    for name, own in by_file.items():
        batches = [batch for region in _regions(own) for batch in _cut(region)]
        try:
            found = _move_file(folder / name, batches, devices, open_file, move)
        except OSError as error:
            raise OSError(f"{folder / name}: {error}") from error
        crcs += itertools.chain.from_iterable(found)
        parts += itertools.chain.from_iterable(batches)
    return _tallies(transfers, parts, crcs)


def _move_file(
    path: Path,
    batches: Sequence[_Batch],
    devices: set[torch.device],
    open_file: Callable[[Path], File],
    move: Callable[[File, torch.Tensor, _Batch], list[int]],
) -> list[list[int]]:
    file, of_thread = open_file(path), threading.local()

    def run(batch: _Batch) -> list[int]:
        if not hasattr(of_thread, "block"):
            of_thread.block = _block(devices)
        return move(file, of_thread.block, batch)

    # The disk works on the next batches while one is copied and checksummed.
    pool: ThreadPoolExecutor = ThreadPoolExecutor(_NUM_THREADS, "layerzero-transfer")
    try:
        found = [*pool.map(run, batches)]
        file.finish()
        return found
    finally:
        pool.shutdown()
        file.close()


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
