"""Members: the parameters of a WholeTensorOptimizer, with their owners and whole tensors."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from layerzero.flat.parameter_info import copy_attributes, get_info
from layerzero.flat.placement import Placement
from layerzero.optim.whole_tensor.maps import Block, maps_of
from layerzero.optim.whole_tensor.ownership import assign_owners
from layerzero.optim.whole_tensor.party import Party
from layerzero.optim.whole_tensor.plan import Span, WholeTensor
from layerzero.step.handle import FlatParamHandle
from layerzero.step.root import RootState
from layerzero.step.unit import Unit

Cost = Callable[[torch.Size], float]
_Place = tuple[nn.Parameter, Unit, FlatParamHandle, int]


@dataclass(eq=False)
class Member:
    """A sharded parameter, the owner of its whole tensor, and on the owner that tensor."""

    parameter: nn.Parameter
    unit: Unit
    handle: FlatParamHandle
    party: Party
    whole: WholeTensor
    blocks: tuple[Block, ...]
    fqn: str
    tensor: nn.Parameter | None
    """The whole tensor; None on ranks that do not own it."""

    # This rank's piece, flat

    def gradient(self, _: Span) -> torch.Tensor:
        assert self.parameter.grad is not None, "only gradients that exist are sent"
        return self.parameter.grad.detach().reshape(-1)

    def value(self, _: Span) -> torch.Tensor:
        return self.parameter.detach().view(-1)

    # On the owner

    def staged_values(self) -> Staged | None:
        """The blocks of the whole tensor; None if this rank does not own it."""
        return None if self.tensor is None else Staged(self.tensor.detach(), self.blocks)

    def staged_gradient(self) -> Staged | None:
        """Memory for the whole gradient, which may be this rank's piece itself."""
        if self.tensor is None:
            return None
        self.tensor.requires_grad_(self.parameter.requires_grad)
        piece = self.parameter.grad
        if self.whole.lies_with_owner and piece is not None:
            self.tensor.grad = piece.detach().reshape(self.tensor.shape)
        else:
            self.tensor.grad = torch.empty_like(self.tensor)
        return Staged(self.tensor.grad.detach(), self.blocks)


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

    def elements(self, span: Span) -> torch.Tensor:
        return self._flat[span.block][span.start : span.stop]

    def load(self) -> None:
        """Copy blocks out of the whole tensor, where they are no views."""
        for view, staged in self._copied:
            staged.copy_(view)

    def store(self) -> None:
        """Copy blocks into the whole tensor, where they are no views."""
        for view, staged in self._copied:
            view.copy_(staged)


def shape_of(parameter: nn.Parameter) -> torch.Size:
    """The original shape of a sharded parameter."""
    info = get_info(parameter)
    assert info is not None, "it is sharded"
    return info.shape


def fqn_of(parameter: nn.Parameter) -> str:
    info = get_info(parameter)
    assert info is not None, "it is sharded"
    return info.fqn


def contents_of(member: Member, root: RootState) -> tuple[list[int], int]:
    """Changes whenever the member's flat parameter is written: its versions, on CPU a checksum.

    Writes through `.data` change no version; on a device a checksum would block the host.
    """
    shard, versions = member.handle.main_shard.detach(), member.handle.versions
    if root.streams.are_apart or member.party.size == 1:
        return versions, 0
    return versions, zlib.crc32(shard.view(torch.uint8).numpy().data)


def own(
    root: RootState,
    parameters: Sequence[nn.Parameter],
    cost: Cost,
    parties: dict[Placement, Party],
) -> list[Member]:
    """Choose owners, and make the whole tensors that this rank owns, without values.

    Collective over the ranks that share the model; blocks the host.

    Args:
        parties: of earlier parameters; new ones are added.

    Returns:
        Members in the order of the model's units.
    """
    wanted = set(parameters)
    placed: dict[Placement, list[_Place]] = {}
    order: dict[nn.Parameter, int] = {}
    for unit, handle in [(each, handle) for each in root.units for handle in each.handles]:
        places = placed.setdefault(handle.placement, [])
        for index, parameter in enumerate(handle.sharded_params):
            if parameter in wanted:
                places.append((parameter, unit, handle, index))
                order[parameter] = len(order)
    members: list[Member] = []
    # Experts first: fewer ranks can own them, and the other tensors even out the load.
    for placement in sorted(placed, key=lambda placement: placement.data_parallel is None):
        if placement not in parties:
            parties[placement] = Party(root, placement, _mesh_of(root, placement))
        party = parties[placement]
        loads = party.loads
        experts = [other for at, other in parties.items() if at.data_parallel is not None]
        if placement.data_parallel is None and experts:
            elsewhere = sum(other.loads[other.rank] for other in experts)
            theirs = party.gather(root, "cost of experts", elsewhere)
            loads = [a + b for a, b in zip(loads, theirs, strict=True)]
        members += _own_in(root, party, placed[placement], cost, loads)
    return sorted(members, key=lambda member: order[member.parameter])


def _mesh_of(root: RootState, placement: Placement) -> DeviceMesh | None:
    """The mesh of the DTensor parameters in units of a placement; None: there are none."""
    splits = (
        split
        for unit in root.units
        for handle in unit.handles
        if handle.placement == placement
        for split in handle.splits
    )
    return next((split.mesh for split in splits if split is not None), None)


def _own_in(
    root: RootState, party: Party, places: Sequence[_Place], cost: Cost, loads: Sequence[float]
) -> list[Member]:
    maps = maps_of(root, party, [(parameter, handle, n) for parameter, _, handle, n in places])
    held: list[Mapping[int, int]] = [
        {p.holder: p.stop - p.start for replica in each.replicas for p in replica} for each in maps
    ]
    costs = [float(cost(shape_of(parameter))) for parameter, *_ in places]
    owners = assign_owners(costs, held, party.size, loads)
    members = []
    for place, each, owner, own_cost in zip(places, maps, owners, costs, strict=True):
        parameter, unit, handle, _ = place
        party.add_load(owner, own_cost)
        whole = WholeTensor(parameter.itemsize, owner, each.replicas, each.replica_of_rank[owner])
        tensor = _make_whole(parameter, whole) if owner == party.rank else None
        fqn = fqn_of(parameter)
        members.append(Member(parameter, unit, handle, party, whole, each.blocks, fqn, tensor))
    return members


def _make_whole(parameter: nn.Parameter, whole: WholeTensor) -> nn.Parameter:
    shape = shape_of(parameter)
    piece = parameter.detach()
    values = piece.view(shape) if whole.lies_with_owner else piece.new_empty(shape)
    tensor = nn.Parameter(values, requires_grad=parameter.requires_grad)
    copy_attributes(parameter, tensor)  # Optimizers may look at what a framework set.
    return tensor
