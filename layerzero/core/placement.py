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
from functools import cached_property
from typing import Literal

from layerzero.core.groups import ShardGroup

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
