"""Cuts the shards of one file into batches: what one thread moves with one call.

Bytes that are adjacent in the file are cut at pages, for direct I/O, and into batches of about
equal size: with a few small ones at the end of each run the disk would wait more often.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from layerzero.checkpoint.file_io.direct_io import PAGE_NBYTES, bytes_of
from layerzero.checkpoint.format.inventory import Entry
from layerzero.checkpoint.format.safetensors_file import TensorEntry

BATCH_NBYTES = 8 << 20
"""Largest batch, so that it is still in the CPU cache when it is moved after being checksummed, or
the other way round."""
_MAX_SLICES = 512
"""Largest number of buffers in one call; systems allow 1024 (IOV_MAX)."""


class Transfer(NamedTuple):
    """A shard and the tensor in a file that it is part of."""

    file: str
    place: TensorEntry
    number: int
    """Number of the tensor, the same on all ranks."""
    entry: Entry
    spare: tuple[int, int] = (0, 0)
    """Bytes in memory before and behind the shard that are laid out like the file, and that a read
    may fill."""


class Slice(NamedTuple):
    """Adjacent bytes of a shard and of the file."""

    offset: int
    data: memoryview | torch.Tensor
    """Bytes; of a shard on a device a tensor."""
    transfer: int
    """Index of the transfer that it is part of."""
    behind: int
    """Bytes of the tensor behind this slice."""
    spare: tuple[int, int]
    """As in `Transfer`, relative to this slice."""

    @property
    def end(self) -> int:
        return self.offset + len(self.data)

    def cut(self, nbytes: int) -> tuple[Slice, Slice]:
        """The first `nbytes` and the rest."""
        before, behind = self.spare
        rest = len(self.data) - nbytes
        head = self._replace(data=self.data[:nbytes], behind=self.behind + rest)
        tail = self._replace(offset=self.offset + nbytes, data=self.data[nbytes:])
        if not any(self.spare):
            return head, tail
        return head._replace(spare=(before, behind + rest)), tail._replace(
            spare=(before + nbytes, behind)
        )


def batches_of(transfers: Sequence[Transfer], indices: Sequence[int]) -> list[list[Slice]]:
    """The batches of the shards of one file, in its order.

    Args:
        indices: those of `transfers` that are of this file.
    """
    slices = [each for index in indices for each in _slices(transfers[index], index)]
    slices.sort(key=lambda each: each.offset)
    batches: list[list[Slice]] = []
    first = 0
    for index, each in enumerate(slices, 1):
        if index == len(slices) or slices[index].offset != each.end:
            batches += _cut(slices[first:index])
            first = index
    return batches


def is_on_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def _slices(transfer: Transfer, index: int) -> Iterator[Slice]:
    entry, place = transfer.entry, transfer.place
    tensor = entry.tensor
    data = bytes_of(tensor) if is_on_host(tensor) else tensor.view(torch.uint8)
    width = place.dtype.itemsize
    for run in entry.runs():
        start, stop = run.start * width, (run.start + run.numel) * width
        part = data[run.local * width : (run.local + run.numel) * width]
        yield Slice(place.begin + start, part, index, place.nbytes - stop, transfer.spare)


def _cut(slices: Sequence[Slice]) -> Iterator[list[Slice]]:
    """Cut adjacent slices into batches."""
    first_page = slices[0].offset // PAGE_NBYTES * PAGE_NBYTES
    nbytes = slices[-1].end - first_page
    num_batches = -(-nbytes // BATCH_NBYTES)
    step = -(-nbytes // (num_batches * PAGE_NBYTES)) * PAGE_NBYTES
    stop = first_page + step
    batch: list[Slice] = []
    for rest in slices:
        while rest.end > stop:
            head, rest = rest.cut(stop - rest.offset)
            yield [*batch, head]
            batch, stop = [], stop + step
        batch.append(rest)
        if rest.end == stop or len(batch) == _MAX_SLICES:
            yield batch
            batch = []
            stop += step if rest.end == stop else 0
    if batch:
        yield batch
