"""Parties: the ranks that share a unit's parameters, and so the owners of its whole tensors.

mesh (dp=2, tp=2), ranks      0 1      a row: one data-parallel rank, whose tensor-parallel ranks
                              2 3      hold blocks (or copies) of each tensor
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from layerzero.comm.collectives import exchange_on_host, gather_small
from layerzero.comm.new_groups import agree_on_group_names, new_group, options_like
from layerzero.comm.pending import Operation
from layerzero.flat.groups import ShardGroup, describe_group, make_shard_group, mesh_groups
from layerzero.flat.placement import Placement
from layerzero.step.root import RootState


class Party:
    """All ranks that share the units of one placement, in one group, in the order of ranks."""

    group: ShardGroup
    axes: tuple[ShardGroup, ...]
    """This rank's tensor-parallel group along each axis of their mesh; (): there is none."""
    holders: tuple[tuple[tuple[int, ...], ...], ...]
    """Group ranks as [tensor-parallel place][main shard][copy]. The place counts along `axes`, the
    first of which varies fastest."""
    loads: list[float]
    """Cost of the tensors of this party that each rank owns."""

    def __init__(self, root: RootState, placement: Placement, mesh: DeviceMesh | None) -> None:
        """Find or make the groups. Collective over the ranks of the party; blocks the host.

        Args:
            mesh: of the DTensor parameters of its units; None: they have none.
        """
        holders = placement.holders()
        members = {rank for row in holders for rank in row}
        axes = mesh_groups(mesh, root.device, placement.shard_group.timeout)
        # Of a model whose experts alone are DTensors, other units are sharded along these axes.
        self.axes = tuple(
            group
            for group in axes or root.tensor_parallel_groups
            if group.size > 1 and len(members.intersection(group.ranks)) == 1
        )
        tables: Sequence[Sequence[Sequence[int]]] = [holders]
        if self.axes:
            own = torch.tensor(holders, dtype=torch.int64, device=root.device)
            tables = self.gather_along_axes(root, own).tolist()
        ranks = tuple(sorted({rank for table in tables for row in table for rank in row}))
        self.group = _group_of(root, placement, ranks, self.axes)
        number_of = {rank: number for number, rank in enumerate(self.group.ranks)}
        self.holders = tuple(
            tuple(tuple(number_of[rank] for rank in row) for row in table) for table in tables
        )
        self._host_group = _host_group_of(root, self.group)
        for group in (*self.axes, self._host_group):
            root.operations.phases.cover(group)
        self._num_host_exchanges = 0
        self.loads = [0.0] * self.group.size

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def size(self) -> int:
        return self.group.size

    def add_load(self, rank: int, cost: float) -> None:
        self.loads[rank] += cost

    def gather_along_axes(self, root: RootState, own: torch.Tensor) -> torch.Tensor:
        """[tensor-parallel places, *shape]: each place's tensor. Collective over `axes`."""
        values = own
        for axis in self.axes:
            operation = root.operations.next_tensor_parallel("exchange", "whole tensors", axis)
            values = gather_small(values, axis, operation)
        return values.reshape(-1, *own.shape)

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


def _group_of(
    root: RootState, placement: Placement, ranks: tuple[int, ...], axes: Sequence[ShardGroup]
) -> ShardGroup:
    """These ranks as one group. Collective if it has to be made."""
    for group in (placement.shard_group, placement.outer_group, placement.world, *axes):
        if group is not None and tuple(sorted(group.ranks)) == ranks:
            return group
    inner = placement.shard_group
    made = _made.setdefault(root, {})
    if ranks not in made:
        agree_on_group_names([*placement.groups, *axes], root.device)
        made[ranks] = new_group(
            ranks,
            dist.get_backend_config(inner.process_group),
            inner.timeout,
            options_like(inner.process_group, root.device),
        )
    return make_shard_group(made[ranks], root.device, inner.timeout)


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
