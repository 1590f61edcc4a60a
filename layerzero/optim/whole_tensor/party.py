"""Parties: the ranks that share a unit's parameters, and so the owners of its whole tensors."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from layerzero.comm.collectives import gather_small
from layerzero.comm.group_names import agree_on_group_names
from layerzero.comm.new_groups import new_group, options_like
from layerzero.core.groups import ShardGroup, make_shard_group
from layerzero.core.placement import Placement
from layerzero.runtime.root import RootState


class Party:
    """All ranks that share the units of one placement, in one group, in the order of ranks."""

    group: ShardGroup
    holders: tuple[tuple[int, ...], ...]
    """Group ranks that hold each main shard; several with `outer="replicate"`."""
    loads: list[float]
    """Cost of the tensors of this party that each rank owns."""

    def __init__(self, root: RootState, placement: Placement) -> None:
        """Find or make the group. Collective over the placement's ranks; blocks the host."""
        self.group = _group_of(root, placement)
        self.loads = [0.0] * self.group.size
        indices = self.gather(root, "main shards", placement.main_shard_index)
        self.holders = tuple(
            tuple(rank for rank, index in enumerate(indices) if index == shard)
            for shard in range(placement.num_main_shards)
        )

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def size(self) -> int:
        return self.group.size

    def add_load(self, rank: int, cost: float) -> None:
        self.loads[rank] += cost

    def gather(self, root: RootState, what: str, own: float) -> list[float]:
        """Every rank's number. Collective; blocks the host."""
        if self.size == 1:
            return [own]
        operation = root.operations.next("exchange", what, self.group)
        value = torch.tensor([own], dtype=torch.float32, device=root.device)
        return gather_small(value, self.group, operation).view(-1).tolist()


_made: WeakKeyDictionary[RootState, dict[tuple[int, ...], dist.ProcessGroup]]
_made = WeakKeyDictionary()
"""Groups made for parties, by model and members. Two models do not share one: the number that tells
their messages apart is counted on the model's own groups alone."""


def _group_of(root: RootState, placement: Placement) -> ShardGroup:
    """The placement's members as one group. Collective if it has to be made."""
    members = tuple(sorted(placement.members))
    known: Sequence[ShardGroup | None] = (
        placement.shard_group,
        placement.outer_group,
        placement.world,
    )
    for group in known:
        if group is not None and tuple(sorted(group.ranks)) == members:
            return group
    inner = placement.shard_group
    made = _made.setdefault(root, {})
    if members not in made:
        agree_on_group_names(placement.groups, root.device)
        made[members] = new_group(
            members,
            dist.get_backend_config(inner.process_group),
            inner.timeout,
            options_like(inner.process_group, root.device),
        )
    return make_shard_group(made[members], root.device, inner.timeout)
