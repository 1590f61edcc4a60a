"""Placement: which ranks gather a unit, and which part of it each rank owns for the optimizer.

Two axes. The *shard group* (inner) gathers parameters before each use; the *outer group* holds the
ranks with the same place in other shard groups. Six ranks, shard groups of 2, outer groups of 3:

    rank         0     1     2     3     4     5        (outer k, inner j) = divmod(rank, 2)
    (k, j)     (0,0) (0,1) (1,0) (1,1) (2,0) (2,1)
    gathers    with its inner peer: compute shard j, one of 2
    zero1      owns slice 0 of shard j, slice 1, slice 2:   one of 6 main shards
    replicate  owns shard j as a whole, as two others do:   one of 2 main shards

So both directions are two hops (Note [Ownership is strided]):

    main shard --outer all-gather, once a step--> compute shard --inner all-gather--> full
    gradient --inner reduce-scatter--> compute shard --outer reduce-scatter--> main shard

Note [Ownership is strided]
    Rank (k, j) owns slice k of compute shard j, not slice j of k: then the ranks that complete a
    compute shard are its outer peers, and all that crosses the outer axis is 1/inner of the model.
    In the flat buffer the slices of all ranks lie in the order (j, k).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Literal
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from layerzero.core.groups import ShardGroup, make_shard_group, make_shard_groups

Outer = Literal["zero1", "replicate", "shard"]


@dataclass(frozen=True)
class Placement:
    """Where the shards of a unit live. All that differs between modes of `outer` is here."""

    shard_group: ShardGroup
    outer_group: ShardGroup | None
    """None where every rank is in the shard group."""
    owned_slices: int
    """Number of the outer group's slices of a compute shard that this rank's main shard holds."""
    members: tuple[int, ...]
    """Global numbers of all ranks that share the model."""
    world: ShardGroup | None = None
    """All ranks, where gradients are summed in one hop in their order (`deterministic`)."""
    world_slices: tuple[int, ...] = ()
    """For each rank of `world`, the slice of the flat buffer that is reduced there."""

    post_forward_group: ShardGroup | None = None
    """With `outer="shard"`: a smaller group that can hold a unit between forward and backward."""
    data_parallel: Placement | None = None
    """The whole model's, where only some of its ranks have this unit (experts)."""

    @cached_property
    def num_slices(self) -> int:
        """Slices that a compute shard is cut into: one for each outer peer."""
        return self.outer_group.size if self.outer_group is not None else 1

    @cached_property
    def num_ranks(self) -> int:
        """Ranks whose gradients are reduced together."""
        return self.shard_group.size * self.num_slices

    @property
    def num_averaged(self) -> int:
        """Ranks whose losses are averaged: their gradients reach this unit one way or another."""
        return self.num_ranks if self.data_parallel is None else self.data_parallel.num_ranks

    @property
    def num_main_shards(self) -> int:
        """Parts that the flat parameter is owned in."""
        return self.num_ranks // self.owned_slices

    @property
    def main_shard_index(self) -> int:
        """Which of them this rank owns."""
        if self.owns_compute_shard or self.outer_group is None:
            return self.shard_group.rank
        return self.shard_group.rank * self.num_slices + self.outer_group.rank

    @cached_property
    def owns_compute_shard(self) -> bool:
        """Whether the main shard covers the compute shard, so that no outer gather is needed."""
        return self.owned_slices == self.num_slices

    @cached_property
    def groups(self) -> tuple[ShardGroup, ...]:
        """The hops, inner first, without groups of one."""
        groups = (self.shard_group, self.outer_group)
        return tuple(group for group in groups if group is not None and group.size > 1)

    @property
    def all_groups(self) -> tuple[ShardGroup, ...]:
        """Every group that collectives of a unit placed like this one run on."""
        rest = (self.world, self.post_forward_group)
        whole = () if self.data_parallel is None else self.data_parallel.all_groups
        return (*self.groups, *(g for g in rest if g is not None and g.size > 1), *whole)

    @cached_property
    def reduce_groups(self) -> tuple[ShardGroup, ...]:
        """The groups that gradients are reduced over, one after the other."""
        return self.groups if self.world is None else (self.world,)

    @cached_property
    def sums_in_shards(self) -> bool:
        """Whether the first hop leaves less than all gradients, and not over the outer group."""
        return self.world is not None or self.shard_group.size > 1

    @property
    def replica(self) -> int:
        """Which copy of the main shard this rank has; 0 where there is one."""
        if self.outer_group is None or self.owned_slices == 1:
            return 0
        return self.outer_group.rank

    @property
    def rank(self) -> int:
        """This rank's global number, for messages."""
        return self.shard_group.ranks[self.shard_group.rank]

    @cached_property
    def is_first(self) -> bool:
        """Whether this is the first of all ranks."""
        return all(group.is_first for group in self.groups)

    @property
    def norm_groups(self) -> tuple[ShardGroup, ...]:
        """Groups that together visit every shard of the model; walked when a norm is summed."""
        return self.owner_groups if self.data_parallel is None else self.data_parallel.groups

    @property
    def num_copies(self) -> int:
        """Copies of each shard along `norm_groups`; a summed power is divided by it."""
        return 1 if self.data_parallel is None else self.num_ranks // self.num_main_shards

    def __str__(self) -> str:
        if self.outer_group is None:
            return f"group of {self.shard_group.size}"
        kind = "replicated" if self.owned_slices > 1 else "split for the optimizer"
        return f"shard groups of {self.shard_group.size}, {kind} over {self.outer_group.size}"

    @property
    def owner_groups(self) -> tuple[ShardGroup, ...]:
        """Groups over which main shards differ, outer first: gathered along them, values come in
        the order of the flat buffer."""
        outer = () if self.owns_compute_shard else (self.outer_group,)
        return tuple(
            group for group in (*outer, self.shard_group) if group is not None and group.size > 1
        )


def make_placement(
    group: dist.ProcessGroup | DeviceMesh | None,
    device: torch.device,
    zero3_size: int | None,
    outer: Outer,
    deterministic: bool,
    timeout: timedelta | None,
) -> Placement:
    """Place shards for tensors on `device`. Collective where groups have to be made.

    All ranks know equally many process groups by then: comm/group_names.py.

    Args:
        group: all ranks, cut into shard groups of `zero3_size` neighbours; or a 2-D mesh
            (outer, inner) that says it all.
        zero3_size: a divisor of the group's size, the same on every rank; None: all of it.

    Raises:
        ValueError: this rank is not in the group or mesh.
    """
    groups = make_shard_groups(group, device, timeout)
    if isinstance(group, DeviceMesh) and group.ndim == 2:
        table = group.mesh.tolist()
    else:
        # Neighbours in the order of global ranks, which is that of every process group made here.
        ranks, size = sorted(groups[0].ranks), zero3_size or groups[0].size
        table = [ranks[start : start + size] for start in range(0, len(ranks), size)]
    members = tuple(sorted(_flat(table)))
    if len(table) == 1:
        return Placement(groups[0], None, 1, members)
    rank = dist.get_rank()
    row = next(row for row in table if rank in row)
    if outer == "shard":
        everyone = _group_of(_flat(table), groups, device)
        inner = _group_of(row, groups, device)
        return Placement(everyone, None, 1, members, post_forward_group=inner)
    column = [row_of_peer[row.index(rank)] for row_of_peer in table]
    world = _group_of(_flat(table), groups, device) if deterministic else None
    slices = _slices(table)
    return Placement(
        shard_group=_group_of(row, groups, device),
        outer_group=_group_of(column, groups, device),
        owned_slices=len(column) if outer == "replicate" else 1,
        members=members,
        world=world,
        world_slices=() if world is None else tuple(slices[rank] for rank in world.ranks),
    )


def _flat(table: list[list[int]]) -> list[int]:
    return [rank for row in table for rank in row]


def _slices(table: list[list[int]]) -> dict[int, int]:
    """See Note [Ownership is strided]."""
    return {rank: j * len(table) + k for k, row in enumerate(table) for j, rank in enumerate(row)}


_made: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]]
_made = WeakKeyDictionary()
"""Groups made for parts of a group or mesh, for the next model on it."""


def _group_of(ranks: list[int], groups: list[ShardGroup], device: torch.device) -> ShardGroup:
    """These ranks as a group: one of `groups`, one made before, or a new one. Collective."""
    wanted = tuple(sorted(ranks))
    for group in groups:
        if tuple(sorted(group.ranks)) == wanted:
            return group
    parent = groups[0]
    made = _made.setdefault(parent.process_group, {})
    if wanted not in made:
        process_group = dist.new_group(
            list(wanted),
            timeout=parent.timeout,
            backend=dist.get_backend_config(parent.process_group),
            use_local_synchronization=True,
        )
        assert process_group is not None, "local synchronization makes a group for members alone"
        made[wanted] = process_group
    # Its own timeout is that of the first model it was made for.
    return make_shard_group(made[wanted], device, parent.timeout)
