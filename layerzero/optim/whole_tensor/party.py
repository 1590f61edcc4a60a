"""Parties: the ranks that share a unit's parameters, and so the owners of its whole tensors."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from layerzero.comm.collectives import Operation, exchange_on_host, gather_small
from layerzero.comm.group_names import agree_on_group_names
from layerzero.comm.new_groups import new_group, options_like
from layerzero.core.groups import ShardGroup, describe_group, make_shard_group
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
        self._host_group = _host_group_of(root, self.group)
        self._num_host_exchanges = 0
        self.loads = [0.0] * self.group.size
        rank_of = {rank: number for number, rank in enumerate(self.group.ranks)}
        self.holders = tuple(tuple(rank_of[rank] for rank in each) for each in placement.holders())

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

    def gather_on_host(self, root: RootState, what: str, own: Sequence[int]) -> list[list[int]]:
        """Every rank's numbers, below 256. Collective over the hosts; waits for no device."""
        if self.size == 1:
            return [list(own)]
        if self._host_group is self.group:
            operation = root.operations.next(what, "the optimizer", self.group)
        else:
            self._num_host_exchanges += 1
            operation = Operation(what, "the optimizer", self._num_host_exchanges)
        return exchange_on_host(own, self._host_group, operation)


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


_made_on_host: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup]
_made_on_host = WeakKeyDictionary()
"""gloo groups with the same ranks, for backends that serve a device alone."""


def _host_group_of(root: RootState, group: ShardGroup) -> ShardGroup:
    """The same ranks, to exchange what is on the host. Collective if it has to be made."""
    if not root.streams.are_apart or group.size == 1:
        return group
    host = torch.device("cpu")
    if "cpu:" in dist.get_backend_config(group.process_group):
        return describe_group(group.process_group, host, group.timeout)
    if group.process_group not in _made_on_host:
        agree_on_group_names([group], root.device)
        made = new_group(group.ranks, "gloo", group.timeout)
        _made_on_host[group.process_group] = made
    return describe_group(_made_on_host[group.process_group], host, group.timeout)
