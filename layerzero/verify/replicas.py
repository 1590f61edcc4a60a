"""Checks that ranks that hold copies of the same weights hold the same bits.

Copies are the main shards of outer peers with `outer="replicate"`, and parameters that are
replicated over tensor-parallel ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch

from layerzero.comm.exchanges import gather_small
from layerzero.flat.parameter_info import get_info
from layerzero.flat.placement import ShardGroup
from layerzero.ops import word_sums
from layerzero.step.root import RootState

_WHAT = "the model"


def find_different(root: RootState, known: Callable[[torch.Tensor], int | None]) -> list[str]:
    """Which copies differ, in words. Collective over the ranks with copies; blocks the host.

    Args:
        known: returns the checksum of a main shard, if that has just been checked.
    """
    return [*_over_outer_peers(root, known), *_over_tensor_parallel_ranks(root)]


def _over_outer_peers(root: RootState, known: Callable[[torch.Tensor], int | None]) -> list[str]:
    by_group: dict[ShardGroup, list[tuple[str, torch.Tensor]]] = {}
    for unit in root.units:
        for handle in unit.handles:
            outer = handle.placement.outer_group
            if outer is not None and outer.size > 1 and handle.placement.owned_slices > 1:
                label = f"the main shard of {unit.label}"
                by_group.setdefault(outer, []).append((label, handle.main_shard))
    found = []
    for group, entries in by_group.items():
        own = torch.tensor([_checksum(tensor, known) for _, tensor in entries], device=root.device)
        operation = root.operations.next("comparison of replicas", _WHAT, group)
        table = gather_small(own, group, operation).tolist()
        for place, (label, _) in enumerate(entries):
            found += _difference(label, [row[place] for row in table], group)
    return found


def _checksum(tensor: torch.Tensor, known: Callable[[torch.Tensor], int | None]) -> int:
    checksum = known(tensor)
    return int(word_sums([tensor])) if checksum is None else checksum


def _over_tensor_parallel_ranks(root: RootState) -> list[str]:
    found = []
    for axis, group in enumerate(root.tensor_parallel_groups):
        if group.size == 1:
            continue
        names, rows = [], []
        for unit in root.units:
            for handle in unit.handles:
                for fqn, split, parameter in zip(
                    handle.fqns, handle.splits, handle.sharded_params, strict=True
                ):
                    if split is not None and split.placements[axis].is_replicate():
                        info = get_info(parameter)
                        assert info is not None
                        start, stop = info.range
                        names.append(fqn)
                        rows.append((start, stop, parameter.detach()))
        if not rows:
            continue
        sums = word_sums(tensor for _, _, tensor in rows).to(root.device)
        places = torch.tensor([row[:2] for row in rows], device=root.device)
        own = torch.cat([places, sums[:, None]], dim=1)
        operation = root.operations.next("comparison of replicas", _WHAT, group)
        table = gather_small(own, group, operation).tolist()
        for place, name in enumerate(names):
            each = [row[place] for row in table]
            # Ranks whose other parameters have other sizes may hold another range of this one.
            if len({tuple(entry[:2]) for entry in each}) == 1:
                found += _difference(f"parameter {name!r}", [e[2] for e in each], group)
    return found


def _difference(label: str, checksums: list[int], group: ShardGroup) -> list[str]:
    counts = Counter(checksums)
    if len(counts) == 1:
        return []
    (usual, number), *_ = counts.most_common(1)
    if number > len(checksums) // 2:
        others = [rank for rank, each in zip(group.ranks, checksums, strict=True) if each != usual]
        listed = " and ".join(f"rank {rank}" for rank in others)
        return [f"comparison of replicas: {label} on {listed} differs from its other copies"]
    listed = ", ".join(f"rank {rank}" for rank in group.ranks)
    return [f"comparison of replicas: the copies of {label} on {listed} differ"]
