"""Who gathers what over whom: the process groups of a placement, found or made."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from layerzero.comm.new_groups import new_group, options_like
from layerzero.flat.groups import ShardGroup, make_shard_group, make_shard_groups
from layerzero.flat.placement import Outer, Placement

Group = dist.ProcessGroup | DeviceMesh


@dataclasses.dataclass(frozen=True)
class Ranks:
    """Stands for a process group where there is none: in a plan of memory."""

    table: tuple[tuple[int, ...], ...]
    """Global ranks, one row for each shard group."""


AnyGroup = Group | Ranks


def ranks_of(group: AnyGroup | None) -> tuple[int, ...]:
    """Global ranks in ascending order."""
    if isinstance(group, Ranks):
        return tuple(sorted(rank for row in group.table for rank in row))
    if isinstance(group, DeviceMesh):
        return tuple(sorted(group.mesh.flatten().tolist()))
    return tuple(sorted(dist.get_process_group_ranks(group)))


def make_placement(
    group: dist.ProcessGroup | DeviceMesh | None,
    device: torch.device,
    zero3_size: int | None,
    outer: Outer,
    deterministic: bool,
    timeout: timedelta | None,
    separate_groups: bool = False,
) -> Placement:
    """Place shards for tensors on `device`. Collective where groups have to be made.

    All ranks must have made equally many process groups: comm/new_groups.py.

    Args:
        group: all ranks, cut into shard groups of `zero3_size` neighbours; or a 2-D mesh
            (outer, inner), which defines both axes.
        zero3_size: a divisor of the group's size, the same on every rank; None: all of it.
        separate_groups: make groups for reductions alone, too.

    Raises:
        ValueError: this rank is not in the group or mesh.
    """
    groups = make_shard_groups(group, device, timeout)
    placement = _place(group, groups, device, zero3_size, outer, deterministic)
    if not separate_groups:
        return placement
    lane = (_group_of(g.ranks, groups, device, "reduce") for g in placement.reduce_groups)
    return dataclasses.replace(placement, reduce_lane=tuple(lane))


def _place(
    group: dist.ProcessGroup | DeviceMesh | None,
    groups: list[ShardGroup],
    device: torch.device,
    zero3_size: int | None,
    outer: Outer,
    deterministic: bool,
) -> Placement:
    if isinstance(group, DeviceMesh) and group.ndim == 2:
        table = group.mesh.tolist()
    else:
        # Neighbours in the order of global ranks, which is that of every process group made here.
        ranks, size = sorted(groups[0].ranks), zero3_size or groups[0].size
        table = [ranks[start : start + size] for start in range(0, len(ranks), size)]
    return place(
        table, dist.get_rank(), outer, deterministic, lambda r: _group_of(r, groups, device)
    )


def place(
    table: list[list[int]],
    rank: int,
    outer: Outer,
    deterministic: bool,
    group_of: Callable[[Sequence[int]], ShardGroup],
) -> Placement:
    """The placement of `rank`; `group_of` finds or makes groups, in the same order on every rank.

    Args:
        table: global ranks, one row for each shard group.
    """
    members = tuple(sorted(_flat(table)))
    if len(table) == 1:
        return Placement(group_of(members), None, 1, members)
    row = next(row for row in table if rank in row)
    if outer == "shard":
        everyone = group_of(_flat(table))
        inner = group_of(row)
        return Placement(everyone, None, 1, members, post_forward_group=inner)
    column = [row_of_peer[row.index(rank)] for row_of_peer in table]
    world = group_of(_flat(table)) if deterministic else None
    slices = _slices(table)
    return Placement(
        shard_group=group_of(row),
        outer_group=group_of(column),
        owned_slices=len(column) if outer == "replicate" else 1,
        members=members,
        table=tuple(map(tuple, table)),
        world=world,
        world_slices=() if world is None else tuple(slices[rank] for rank in world.ranks),
    )


def _flat(table: list[list[int]]) -> list[int]:
    return [rank for row in table for rank in row]


def _slices(table: list[list[int]]) -> dict[int, int]:
    """See Note [Ownership is strided]."""
    return {rank: j * len(table) + k for k, row in enumerate(table) for j, rank in enumerate(row)}


_made: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, tuple[int, ...]], dist.ProcessGroup]]
_made = WeakKeyDictionary()
"""Groups made for parts of a group or mesh, by lane and ranks, for the next model on it."""


def _group_of(
    ranks: Sequence[int], groups: list[ShardGroup], device: torch.device, lane: str = ""
) -> ShardGroup:
    """These ranks as a group: one of `groups`, one made before, or a new one. Collective.

    Args:
        lane: "reduce": a group for reductions alone, never one of `groups`.
    """
    wanted = tuple(sorted(ranks))
    for group in groups:
        if not lane and tuple(sorted(group.ranks)) == wanted:
            return group
    parent = groups[0]
    made = _made.setdefault(parent.process_group, {})
    if (lane, wanted) not in made:
        made[lane, wanted] = new_group(
            wanted,
            dist.get_backend_config(parent.process_group),
            parent.timeout,
            options_like(parent.process_group, device),
        )
    # Its own timeout is that of the first model it was made for.
    return make_shard_group(made[lane, wanted], device, parent.timeout)
