"""Errors and differences that all ranks report together, before anything else is collective."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence

import torch
import torch.distributed as dist

from layerzero.comm.collectives import gather_small
from layerzero.comm.gather_texts import gather_texts
from layerzero.comm.pending import Operation
from layerzero.flat.groups import ShardGroup
from layerzero.step.root import RootState

_WHAT = "WholeTensorOptimizer"


def groups_of_all(root: RootState) -> list[ShardGroup]:
    """Groups that together connect all ranks that share the model."""
    placements = [handle.placement for unit in root.units for handle in unit.handles]
    whole = placements[0].data_parallel or placements[0]
    return [*whole.groups, *(g for g in root.tensor_parallel_groups if g.size > 1)]


def raise_together(root: RootState, error: Exception | None) -> None:
    """Raise on all ranks if any has an error. Collective over the ranks that share the model.

    Raises:
        Exception: `error` on the ranks that have one; elsewhere ValueError with the first text.
    """
    text = None if error is None else str(error)
    texts = gather_texts(text, dist.get_rank(), groups_of_all(root), root.device, _WHAT)
    if error is not None:
        raise error
    for other, each in texts.items():
        raise ValueError(f"{_WHAT}: rank {other} refused its arguments: {each}")


def refuse_differences(root: RootState, rows: Sequence[str]) -> None:
    """Raise on all ranks if their rows differ. Collective as `raise_together`.

    Args:
        rows: description of this rank's arguments, in short lines.

    Raises:
        ValueError: names the first row in which ranks differ, and what each rank has.
    """
    digest = zlib.crc32("\n".join(rows).encode())
    found = _gather(root, [digest, len(rows)])
    if all(each == found[0] for each in found):
        return
    longest = max(length for _, length in found)
    digests = [zlib.crc32(row.encode()) for row in rows]
    table = _gather(root, digests + [0] * (longest - len(rows)))
    place = next(i for i, column in enumerate(zip(*table, strict=True)) if len({*column}) > 1)
    own = rows[place] if place < len(rows) else "nothing more"
    texts = gather_texts(own, dist.get_rank(), groups_of_all(root), root.device, _WHAT)
    by_text = itertools.groupby(sorted(texts.items(), key=lambda item: item[1]), lambda i: i[1])
    listed = "; ".join(f"{text} on rank {next(items)[0]}" for text, items in by_text)
    raise ValueError(
        f"{_WHAT}: ranks differ: {listed}; pass the same parameters in the same order, the same "
        "class and the same options on every rank"
    )


def _gather(root: RootState, own: Sequence[int]) -> list[list[int]]:
    values = torch.tensor(list(own), dtype=torch.int64, device=root.device)
    for group in groups_of_all(root):
        values = gather_small(values, group, Operation("exchange", _WHAT, 0))
    return values.view(-1, len(own)).tolist()
