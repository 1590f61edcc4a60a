"""Allocates host memory with the layout and alignment of a file, for O_DIRECT reads into place.

Shards that are adjacent in a file are adjacent in memory, and their addresses equal their file
offsets modulo the page size. So direct_io.py reads many of them in one call.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from layerzero.checkpoint.file_io.batches import Transfer
from layerzero.checkpoint.file_io.direct_io import PAGE_NBYTES, pages

_MIN_NBYTES = 256 << 10
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
        # Rounded down, so that addresses equal file offsets modulo the page size.
        first = region[0].begin // PAGE_NBYTES * PAGE_NBYTES
        memory = pages(-(-(region[-1].end - first) // PAGE_NBYTES) * PAGE_NBYTES)
        for begin, end, index in region:
            start, stop = begin - first, end - first
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


class _Place(NamedTuple):
    begin: int
    end: int
    """Offsets in the file."""
    transfer: int
    """Its index."""


def _regions(transfers: Sequence[Transfer], lives: Sequence[Hashable]) -> list[list[_Place]]:
    """Transfers that are adjacent in a file, in the file's order.

    Only shards of a single run, in regions of at least `_MIN_NBYTES`.
    """
    by_file: dict[tuple[str, Hashable], list[_Place]] = {}
    for index, (transfer, life) in enumerate(zip(transfers, lives, strict=True)):
        width = transfer.place.dtype.itemsize
        runs = list(itertools.islice(transfer.entry.runs(), 2))
        if len(runs) == 1:
            begin = transfer.place.begin + runs[0].start * width
            # A file from another source may have tensors at misaligned offsets.
            if begin % width == 0:
                place = _Place(begin, begin + runs[0].numel * width, index)
                by_file.setdefault((transfer.file, life), []).append(place)
    found: list[list[_Place]] = []
    for places in by_file.values():
        regions: list[list[_Place]] = []
        for place in sorted(places):
            if not regions or regions[-1][-1].end != place.begin:
                regions.append([])
            regions[-1].append(place)
        found += [each for each in regions if each[-1].end - each[0].begin >= _MIN_NBYTES]
    return found
