"""Host memory for what is read: it lies as the file does.

Pieces that follow each other in a file follow each other in memory, at addresses that are equal to
their places in the file but for whole pages: direct.py reads many of them at once into place.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

import torch

from layerzero.checkpoint.file_io.direct_io import PAGE_NBYTES, pages
from layerzero.checkpoint.file_io.transfer import Transfer

_MIN_NBYTES = 1 << 20
"""Of what lies side by side; less is not worth a mapping."""


def in_memory(transfers: Sequence[Transfer], lives: Sequence[Hashable]) -> list[Transfer]:
    """The same transfers, each with memory of its own for its piece.

    Args:
        transfers: their pieces' tensors only tell numel and dtype (they may be on meta).
        lives: of each; pieces whose lives differ share no storage, so that some can be freed.
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
    """Where its first run begins in the file, and where the piece would end as one run."""
    width = transfer.place.dtype.itemsize
    begin = transfer.place.begin + next(iter(transfer.entry.runs())).start * width
    return begin, begin + transfer.entry.tensor.nbytes


def _regions(transfers: Sequence[Transfer], lives: Sequence[Hashable]) -> list[list[int]]:
    """Transfers that lie side by side in a file, in the file's order."""
    by_file: dict[tuple[str, Hashable], list[tuple[int, int, int]]] = {}
    for index, (transfer, life) in enumerate(zip(transfers, lives, strict=True)):
        if transfer.entry.tensor.numel() and len(list(transfer.entry.runs())) == 1:
            begin, end = _place(transfer)
            # A file that we did not write may have tensors where no tensor can be.
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
