"""Allocates host memory with the layout and alignment of a file, for O_DIRECT reads into place.

Shards that are adjacent in a file are adjacent in memory, and their addresses equal their file
offsets modulo the page size. So direct_io.py reads many of them in one call.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

import torch

from layerzero.checkpoint.file_io.direct_io import PAGE_NBYTES, pages
from layerzero.checkpoint.file_io.transfer import Transfer

_MIN_NBYTES = 1 << 20
"""Smallest region of adjacent shards that gets a mapping of its own."""


def in_memory(transfers: Sequence[Transfer], lives: Sequence[Hashable]) -> list[Transfer]:
    """The same transfers, each with newly allocated memory for its shard.

    Args:
        transfers: only numel and dtype of their tensors are used, which may be on meta.
        lives: lifetime of each; shards with different lifetimes share no storage, so that one can
            be freed before the other.
    """
    placed = list(transfers)
    for region in _regions(transfers, lives):
        begin, end = _place(transfers[region[0]])[0], _place(transfers[region[-1]])[1]
        shift = begin % PAGE_NBYTES
        memory = pages(-(-(shift + end - begin) // PAGE_NBYTES) * PAGE_NBYTES)
        for index in region:
            start, stop = (shift + place - begin for place in _place(transfers[index]))
            dtype = transfers[index].entry.tensor.dtype
            tensor = memory[start:stop].view(dtype)
            spare = start, len(memory) - stop
            placed[index] = _with(transfers[index], tensor)._replace(spare=spare)
    for index, each in enumerate(placed):
        if each.entry.tensor.is_meta:
            own = torch.empty(each.entry.tensor.shape, dtype=each.entry.tensor.dtype)
            placed[index] = _with(each, own)
    return placed


def _with(transfer: Transfer, tensor: torch.Tensor) -> Transfer:
    return transfer._replace(entry=replace(transfer.entry, tensor=tensor))


def _place(transfer: Transfer) -> tuple[int, int]:
    """File offset of its first run, and where the shard would end if it were a single run."""
    width = transfer.place.dtype.itemsize
    begin = transfer.place.begin + next(iter(transfer.entry.runs())).start * width
    return begin, begin + transfer.entry.tensor.nbytes


def _regions(transfers: Sequence[Transfer], lives: Sequence[Hashable]) -> list[list[int]]:
    """Indices of transfers that are adjacent in a file, in the file's order.

    Only shards of a single run, in regions of at least `_MIN_NBYTES`.
    """
    by_file: dict[tuple[str, Hashable], list[tuple[int, int, int]]] = {}
    for index, (transfer, life) in enumerate(zip(transfers, lives, strict=True)):
        if transfer.entry.tensor.numel() and len(list(transfer.entry.runs())) == 1:
            begin, end = _place(transfer)
            # A file from another source may have tensors at misaligned offsets.
            if begin % transfer.place.dtype.itemsize == 0:
                by_file.setdefault((transfer.file, life), []).append((begin, end, index))
    found: list[list[int]] = []
    for places in by_file.values():
        region: list[int] = []
        first = last = -1
        for begin, end, index in sorted(places):
            if begin != last:
                if last - first >= _MIN_NBYTES:
                    found.append(region)
                region, first = [], begin
            region.append(index)
            last = end
        if last - first >= _MIN_NBYTES:
            found.append(region)
    return found
