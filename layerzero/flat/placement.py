"""Placement: which ranks gather a unit, and which part of it each rank owns for the optimizer.

Ranks form two axes, of which docs/reference/layered.md has a drawing. The *shard group* (inner)
gathers parameters before each use; the *outer group* holds the ranks at the same position in their
shard groups. So gathering and reducing each take two hops (Note [Ownership is strided]):

    main shard --outer all-gather, once a step--> compute shard --inner all-gather--> full
    gradient --inner reduce-scatter--> compute shard --outer reduce-scatter--> main shard

Note [Ownership is strided]
    Rank (k, j) owns slice k of compute shard j, not slice j of compute shard k. So a rank completes
    its compute shard with its outer peers alone, and each outer group exchanges only 1/inner of the
    model. In the flat buffer the slices of all ranks lie in the order (j, k).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import ClassVar, Literal

import torch
import torch.distributed as dist

Outer = Literal["zero1", "replicate", "shard"]


@dataclass(frozen=True)
class ShardGroup:
    """A process group as one rank sees it: its members, this rank's number, backend, timeout."""

    process_group: dist.ProcessGroup
    rank: int
    """This rank's number in the group."""
    ranks: tuple[int, ...]
    """Global rank of each member."""
    backend: str
    """Name of the backend that serves the parameters' device."""
    timeout: timedelta
    """Bound on any collective, unless `model.timeout()` has set another (`limit`)."""

    def __post_init__(self) -> None:
        self.set_limit(None)

    def set_limit(self, limit: timedelta | None) -> None:
        """Set `limit` for the waits that follow; None: back to `timeout`."""
        # Not a field: groups that differ in it alone are equal, and keep their hash.
        self.__dict__["limit"] = self.timeout if limit is None else limit

    limit: ClassVar[timedelta]
    """Bound on the waits that begin now; one that takes longer raises CollectiveError."""

    @cached_property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        return self.rank == 0


@dataclass(frozen=True)
class Placement:
    """Groups that gather and reduce a unit, and this rank's shard. All differences between the
    modes of `outer` are here."""

    shard_group: ShardGroup
    outer_group: ShardGroup | None
    """None if the shard group holds all ranks."""
    owned_slices: int
    """Number of slices of its compute shard, one per outer peer, that a rank's main shard holds."""
    members: tuple[int, ...]
    """Global ranks that share the unit, rising."""
    world: ShardGroup | None = None
    """All ranks, if gradients are summed in one hop, in rank order (`deterministic`); else None."""
    world_slices: tuple[int, ...] = ()
    """Slice of the flat buffer that each rank of `world` reduces."""

    reduce_lane: tuple[ShardGroup, ...] = ()
    """Groups made for reductions alone (`ReductionPolicy.separate_groups`), one for each hop, of
    the same ranks as the groups for gathers; (): none."""
    post_forward_group: ShardGroup | None = None
    """Smaller group that can hold a unit between forward and backward, if `outer="shard"`."""
    data_parallel: Placement | None = None
    """Placement of the model's other units, if only some of its ranks hold this one (experts)."""

    @cached_property
    def num_slices(self) -> int:
        """Number of slices of a compute shard: one for each rank of the outer group."""
        return self.outer_group.size if self.outer_group is not None else 1

    @cached_property
    def num_ranks(self) -> int:
        """Number of ranks whose gradients are reduced together."""
        return self.shard_group.size * self.num_slices

    @property
    def num_averaged(self) -> int:
        """Number of ranks over which the loss is averaged.

        For experts these are all data-parallel ranks, whose tokens reach them by all-to-all.
        """
        return self.num_ranks if self.data_parallel is None else self.data_parallel.num_ranks

    @property
    def num_main_shards(self) -> int:
        """Number of different main shards of a flat parameter."""
        return self.num_ranks // self.owned_slices

    @property
    def main_shard_index(self) -> int:
        """Index of this rank's main shard, in the order of the flat buffer."""
        if self.owns_compute_shard or self.outer_group is None:
            return self.shard_group.rank
        return self.shard_group.rank * self.num_slices + self.outer_group.rank

    @cached_property
    def owns_compute_shard(self) -> bool:
        """Whether the main shard covers the compute shard; then no outer all-gather is needed."""
        return self.owned_slices == self.num_slices

    @cached_property
    def groups(self) -> tuple[ShardGroup, ...]:
        """Shard group and outer group, without groups of one rank."""
        groups = (self.shard_group, self.outer_group)
        return tuple(group for group in groups if group is not None and group.size > 1)

    @property
    def all_groups(self) -> tuple[ShardGroup, ...]:
        """Every group, without groups of one rank, over which a unit's collectives may run."""
        rest = (self.world, self.post_forward_group, *self.reduce_lane)
        whole = () if self.data_parallel is None else self.data_parallel.all_groups
        return (*self.groups, *(g for g in rest if g is not None and g.size > 1), *whole)

    @cached_property
    def reduce_groups(self) -> tuple[ShardGroup, ...]:
        """Groups over which gradients are reduced, one hop each, in order."""
        if self.reduce_lane:
            return self.reduce_lane
        return self.groups if self.world is None else (self.world,)

    @cached_property
    def copy_group(self) -> ShardGroup:
        """Outer peers, among which a reduced shard is copied with `outer="replicate"`."""
        assert self.outer_group is not None, "copies are on outer peers"
        ranks = self.outer_group.ranks
        lane = (group for group in self.reduce_lane if group.ranks == ranks)
        return next(lane, self.outer_group)

    @cached_property
    def sums_in_shards(self) -> bool:
        """Whether the first hop can leave the sum of micro-batches in shards.

        False if it is over the outer group, which only the last micro-batch uses.
        """
        return self.world is not None or self.shard_group.size > 1

    @property
    def replica(self) -> int:
        """Number of this rank's copy of the main shard; 0 if there is only one copy."""
        if self.outer_group is None or self.owned_slices == 1:
            return 0
        return self.outer_group.rank

    @property
    def rank(self) -> int:
        """This rank's global rank, for messages."""
        return self.shard_group.ranks[self.shard_group.rank]

    @cached_property
    def is_first(self) -> bool:
        """Whether this rank is the first of those that share the unit."""
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
        """Groups over which main shards differ, outer first. Gathering over them in this order
        yields the order of the flat buffer."""
        outer = () if self.owns_compute_shard else (self.outer_group,)
        return tuple(
            group for group in (*outer, self.shard_group) if group is not None and group.size > 1
        )


def sum_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """float32, or wider if one of `dtypes` is."""
    widest = torch.float32
    for dtype in dtypes:
        # torch raises for float8, which is narrower.
        if dtype.itemsize > 1:
            widest = torch.promote_types(widest, dtype)
    return widest
