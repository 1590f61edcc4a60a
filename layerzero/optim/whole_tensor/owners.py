"""The parameters of a WholeTensorOptimizer, with an owner rank and, there, a whole tensor each.

mesh (dp=2, tp=2), ranks      0 1      a row: one data-parallel rank, whose tensor-parallel ranks
                              2 3      hold blocks (or copies) of each tensor

Every rank that shares a parameter may own it. Before owners are chosen, each tells the others which
elements it holds: of which block, from where to where, and of which copy.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from layerzero.comm.exchanges import gather_along, gather_small
from layerzero.comm.new_groups import agree_on_group_names, new_group, options_like
from layerzero.flat.groups import describe_group, make_shard_group, mesh_groups
from layerzero.flat.parameter_info import ParameterInfo, copy_attributes, info_of
from layerzero.flat.placement import Placement, ShardGroup
from layerzero.optim.whole_tensor.plan import Move, Piece, WholeTensor, assign_owners
from layerzero.step.handle import FlatParamHandle
from layerzero.step.root import RootState
from layerzero.step.unit import Unit

Cost = Callable[[torch.Size], float]

_made: WeakKeyDictionary[RootState, dict[tuple[str, tuple[int, ...]], dist.ProcessGroup]]
_made = WeakKeyDictionary()
"""Groups made for a model's optimizers, by backend and ranks. Two models do not share one: the
number that tells their messages apart is counted on the model's own groups alone."""


class OwnerGroup:
    """All ranks that share the units of one placement, in the order of ranks."""

    group: ShardGroup
    host_group: ShardGroup
    """The same ranks, for what is on the host."""
    axes: list[ShardGroup]
    """This rank's tensor-parallel group along each axis of their mesh; []: there is none."""
    loads: list[float]
    """Cost of the tensors that each rank owns."""

    def __init__(self, root: RootState, placement: Placement) -> None:
        """Find or make the groups. Collective over the ranks; blocks the host."""
        handles = (h for unit in root.units for h in unit.handles if h.placement == placement)
        splits = (split for handle in handles for split in handle.splits)
        mesh = next((split.mesh for split in splits if split is not None), None)
        axes = mesh_groups(mesh, root.device, placement.shard_group.timeout)
        own = set(placement.members)
        # Of a model whose experts alone are DTensors, other units are sharded along these axes.
        self.axes = [
            group
            for group in axes or root.tensor_parallel_groups
            if group.size > 1 and len(own.intersection(group.ranks)) == 1
        ]
        members = torch.tensor([*own], device=root.device)
        name = partial(root.operations.next, "exchange", "whole tensors")
        members = gather_along(members, self.axes, name)
        self.group = _group_of(root, placement, sorted(members.view(-1).tolist()), self.axes)
        self.host_group = self.group
        if root.streams.are_apart and self.group.size > 1:
            made = self.group.process_group
            if "cpu:" not in dist.get_backend_config(made):
                made = _make_group(root, self.group.ranks, "gloo", [self.group])
            self.host_group = describe_group(made, torch.device("cpu"), self.group.timeout)
        for group in (*self.axes, self.host_group):
            root.operations.phases.cover(group)
        self.loads = [0.0] * self.group.size

    def gather(self, root: RootState, what: str, own: torch.Tensor) -> torch.Tensor:
        """[ranks, *own.shape]. Collective; blocks the host on CPU."""
        if self.group.size == 1:
            return own.unsqueeze(0)
        operation = root.operations.next("exchange", what, self.group)
        return gather_small(own, self.group, operation)

    def replica_of(self, placement: Placement, info: ParameterInfo) -> int:
        """Number of the copy of a parameter that this rank has a part of."""
        number, count = placement.replica, placement.num_ranks // placement.num_main_shards
        split = info.tensor_parallel
        copies = [True] * len(self.axes)  # Without a split each rank of an axis has a copy.
        if split is not None:
            sizes = zip(split.placements, split.mesh.shape, strict=True)
            copies = [each.is_replicate() for each, size in sizes if size > 1]
        for axis, is_copy in zip(self.axes, copies, strict=True):
            if is_copy:
                number += count * axis.rank
                count *= axis.size
        return number


def _group_of(
    root: RootState, placement: Placement, ranks: list[int], axes: Sequence[ShardGroup]
) -> ShardGroup:
    """These ranks as one group. Collective if it has to be made."""
    for group in (placement.shard_group, placement.outer_group, placement.world, *axes):
        if group is not None and sorted(group.ranks) == ranks:
            return group
    like = placement.shard_group.process_group
    backend = dist.get_backend_config(like)
    made = _make_group(root, ranks, backend, [*placement.groups, *axes], like)
    return make_shard_group(made, root.device, placement.shard_group.timeout)


def _make_group(
    root: RootState,
    ranks: Sequence[int],
    backend: str,
    near: Sequence[ShardGroup],
    like: dist.ProcessGroup | None = None,
) -> dist.ProcessGroup:
    """`near`: groups that together connect the ranks."""
    made, key = _made.setdefault(root, {}), (backend, tuple(ranks))
    if key not in made:
        agree_on_group_names(near, root.device)
        options = None if like is None else options_like(like, root.device)
        made[key] = new_group(ranks, backend, near[0].timeout, options)
    return made[key]


class Block(NamedTuple):
    """A block of a whole tensor, one number per dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(eq=False)
class Member:
    """A sharded parameter, the owner of its whole tensor, and on the owner that tensor."""

    parameter: nn.Parameter
    unit: Unit
    handle: FlatParamHandle
    owners: OwnerGroup
    whole: WholeTensor
    blocks: Sequence[Block]
    tensor: nn.Parameter | None
    """The whole tensor; None on ranks that do not own it."""

    @property
    def fqn(self) -> str:
        return info_of(self.parameter).fqn

    def piece(self, of_gradient: bool) -> torch.Tensor:
        """This rank's piece of the gradient or of the values, flat."""
        given = self.parameter.grad if of_gradient else self.parameter
        assert given is not None, "only gradients that exist are sent"
        return given.detach().reshape(-1)

    def staged(self, of_gradient: bool) -> Staged:
        """The blocks of the whole values, or of memory for the whole gradient, which may be this
        rank's piece itself. On the owner alone."""
        assert self.tensor is not None, "owned"
        if not of_gradient:
            return Staged(self.tensor.detach(), self.blocks)
        self.tensor.requires_grad_(self.parameter.requires_grad)
        piece = self.parameter.grad
        if self.whole.lies_with_owner and piece is not None:
            self.tensor.grad = piece.detach().reshape(self.tensor.shape)
        else:
            self.tensor.grad = torch.empty_like(self.tensor)
        return Staged(self.tensor.grad.detach(), self.blocks)

    def contents(self, root: RootState) -> tuple[list[int], int]:
        """Changes whenever the flat parameter is written: its versions, on CPU a checksum.

        Writes through `.data` change no version; on a device a checksum would block the host.
        """
        shard, versions = self.handle.main_shard.detach(), self.handle.versions
        if root.streams.are_apart or self.owners.group.size == 1:
            return versions, 0
        return versions, zlib.crc32(shard.view(torch.uint8).numpy().data)


class Staged:
    """A whole tensor as flat blocks: views where a block is contiguous, else memory of its own."""

    def __init__(self, whole: torch.Tensor, blocks: Sequence[Block]) -> None:
        self._copied: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._flat: list[torch.Tensor] = []
        for block in blocks:
            view = whole[tuple(slice(at, at + n) for at, n in zip(*block, strict=True))]
            if view.is_contiguous():
                self._flat.append(view.view(-1))
            else:
                self._flat.append(view.new_empty(view.numel()))
                self._copied.append((view, self._flat[-1].view(view.shape)))

    def elements(self, move: Move) -> torch.Tensor:
        return self._flat[move.block][move.start : move.stop]

    def load(self) -> None:
        """Copy blocks out of the whole tensor, where they are no views."""
        for view, staged in self._copied:
            staged.copy_(view)

    def store(self) -> None:
        """Copy blocks into the whole tensor, where they are no views."""
        for view, staged in self._copied:
            view.copy_(staged)


def choose_owners(
    root: RootState,
    parameters: Sequence[nn.Parameter],
    cost: Cost,
    groups: dict[Placement, OwnerGroup],
) -> list[Member]:
    """Choose owners, and make the whole tensors that this rank owns, without values. Returns
    members in the order of the model's units. Collective over the ranks that share the model;
    blocks the host. `groups`: of earlier parameters; new ones are added."""
    wanted = set(parameters)
    placed: dict[Placement, list[tuple[nn.Parameter, Unit, FlatParamHandle]]] = {}
    order: dict[nn.Parameter, int] = {}
    for unit, handle in [(each, handle) for each in root.units for handle in each.handles]:
        found = [p for p in handle.sharded_params if p in wanted]
        placed.setdefault(handle.placement, []).extend((p, unit, handle) for p in found)
        order |= {parameter: len(order) + n for n, parameter in enumerate(found)}
    members: list[Member] = []
    # Experts first: fewer ranks can own them, and the other tensors even out the load.
    for placement in sorted(placed, key=lambda placement: placement.data_parallel is None):
        if placement not in groups:
            groups[placement] = OwnerGroup(root, placement)
        owners, chosen = groups[placement], placed[placement]
        if not chosen:
            continue
        loads = owners.loads
        experts = [other for at, other in groups.items() if at.data_parallel is not None]
        if placement.data_parallel is None and experts:
            elsewhere = sum(other.loads[other.group.rank] for other in experts)
            own = torch.tensor(elsewhere, dtype=torch.float32, device=root.device)
            theirs = owners.gather(root, "cost of experts", own).tolist()
            loads = [a + b for a, b in zip(loads, theirs, strict=True)]
        infos = [info_of(parameter) for parameter, _, _ in chosen]
        held = _held(root, owners, placement, infos)
        costs = [float(cost(info.shape)) for info in infos]
        numels = [{p.holder: p.stop - p.start for r in each.replicas for p in r} for each in held]
        numbers = assign_owners(costs, numels, owners.group.size, loads)
        for place, each, owner, own_cost in zip(chosen, held, numbers, costs, strict=True):
            parameter = place[0]
            owners.loads[owner] += own_cost
            source = each.replica_of_rank[owner]
            whole = WholeTensor(parameter.itemsize, owner, each.replicas, source)
            tensor = _make_whole(parameter, whole) if owner == owners.group.rank else None
            members.append(Member(*place, owners, whole, each.blocks, tensor))
    return sorted(members, key=lambda member: order[member.parameter])


class _Held(NamedTuple):
    """Which rank holds which elements of a whole tensor."""

    blocks: list[Block]
    replicas: tuple[tuple[Piece, ...], ...]
    replica_of_rank: list[int]


def _held(
    root: RootState, owners: OwnerGroup, placement: Placement, infos: Sequence[ParameterInfo]
) -> list[_Held]:
    """Have all ranks exchange what they hold of these parameters. Collective over `owners`."""
    width = max((info.ndim for info in infos), default=0)
    rows = []
    for info in infos:
        split, rest = info.tensor_parallel, [0] * (width - info.ndim)
        offsets = [0] * info.ndim if split is None else split.offset
        sizes = info.shape if split is None else split.local_shape
        replica = owners.replica_of(placement, info)
        rows.append([*offsets, *rest, *sizes, *rest, *info.range, replica])
    own = torch.tensor(rows, dtype=torch.int64, device=root.device)
    table = owners.gather(root, "whole tensors", own).transpose(0, 1).tolist()
    held = []
    for info, by_rank in zip(infos, table, strict=True):
        ndim = info.ndim
        parts = [Block(tuple(r[:ndim]), tuple(r[width : width + ndim])) for r in by_rank]
        blocks = sorted({*parts})
        replicas: list[list[Piece]] = [[] for _ in range(1 + max(row[-1] for row in by_rank))]
        for holder, (part, (*_, start, stop, replica)) in enumerate(
            zip(parts, by_rank, strict=True)
        ):
            if start < stop:
                replicas[replica].append(Piece(start, stop, holder, blocks.index(part)))
        held.append(_Held(blocks, tuple(map(tuple, replicas)), [row[-1] for row in by_rank]))
    return held


def _make_whole(parameter: nn.Parameter, whole: WholeTensor) -> nn.Parameter:
    shape = info_of(parameter).shape
    piece = parameter.detach()
    values = piece.view(shape) if whole.lies_with_owner else piece.new_empty(shape)
    tensor = nn.Parameter(values, requires_grad=parameter.requires_grad)
    copy_attributes(parameter, tensor)  # Optimizers may look at what a framework set.
    return tensor
