"""Compares the plans of all ranks and makes the process groups, before any unit is built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from layerzero.comm.collectives import Operation, gather_small
from layerzero.comm.group_names import agree_on_group_names
from layerzero.construct.arguments import Arguments
from layerzero.construct.experts import check_experts, place_units, structure_of
from layerzero.construct.make_placement import make_placement
from layerzero.construct.optional import OptionalModules, agree_on_optional
from layerzero.construct.plan import WrapPlan
from layerzero.construct.same_start import Outline
from layerzero.core.groups import ShardGroup, make_shard_groups, mesh_groups
from layerzero.core.placement import Outer, Placement
from layerzero.notices import outside, warn_once

_OUTER: tuple[Outer, ...] = get_args(Outer)


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Over which ranks a model's units are sharded."""

    placement: Placement
    """Placement of the whole model."""
    placements: Mapping[int, Placement]
    """Placement of each unit, keyed by id(plan); experts have one of their own."""
    tensor_parallel_groups: tuple[ShardGroup, ...]
    """One group for each axis of the DTensors' mesh."""


def agree_on_topology(plan: WrapPlan, given: Arguments) -> Topology:
    """Compare arguments and plans of all ranks, and make the groups.

    Collective over the model's ranks; blocks the host.

    Raises:
        ValueError: on every rank: arguments or models differ between ranks, or do not fit.
        CollectiveError: a rank did not take part.
    """
    device, timeout, mode = plan.device, given.timeout, given.outer
    axes = make_shard_groups(given.process_group, device, timeout)
    structure = structure_of(plan.units, plan.experts)
    outline = Outline(plan.units, plan.experts)
    separate = given.reduction.separate_groups
    _check_agreement(
        axes,
        device,
        given.zero3_size,
        mode,
        separate,
        plan.mesh,
        structure,
        outline,
        plan.optional,
    )
    agree_on_group_names(axes, device)
    in_order = given.reduction.deterministic
    placement = make_placement(
        given.process_group, device, given.zero3_size, mode, in_order, timeout, separate
    )
    check_experts(plan.units, plan.experts, placement, device)
    groups = mesh_groups(plan.mesh, device, timeout)
    placements = place_units(
        plan.units, plan.experts, placement, device, mode, in_order, timeout, separate
    )
    return Topology(placement=placement, placements=placements, tensor_parallel_groups=groups)


def _check_agreement(
    axes: Sequence[ShardGroup],
    device: torch.device,
    zero3_size: int | None,
    outer: Outer,
    separate_groups: bool,
    tensor_parallel: DeviceMesh | None,
    experts: int,
    outline: Outline,
    optional: OptionalModules,
) -> None:
    """Raise if ranks differ, or if their arguments do not fit. Collective over `axes`.

    Args:
        axes: the ranks that share the model: one group, or a mesh's inner and outer ones.
        tensor_parallel: mesh of the DTensor parameters.
        experts: checksum from `structure_of` (experts.py).
        outline: outline of the parameters that all these ranks have.
        optional: the optional modules, which must be the same on all these ranks.

    Raises:
        ValueError: on every rank; lists each rank's value if they differ.
        TypeError: as refused for `optional_modules`; other ranks then raise ValueError.
        CollectiveError: a rank did not take part.
    """
    num_inner, num_outer = axes[0].size, axes[1].size if len(axes) == 2 else 1
    own = [
        num_inner if zero3_size is None else zero3_size,
        _OUTER.index(outer),
        -1 if tensor_parallel is None else _place_in(tensor_parallel),
        experts,
        outline.number | optional.number << 32,
        separate_groups,
    ]
    values = torch.tensor(own, device=device)
    for axis in axes:
        if axis.size > 1:
            values = gather_small(values, axis, Operation("exchange", "zero3_size and outer", 0))
    every = values.view(-1, len(own)).tolist()
    if any(other[:2] != every[0][:2] for other in every):
        listed = "; ".join(f"zero3_size={size}, outer={_OUTER[mode]!r}" for size, mode, *_ in every)
        raise ValueError(
            f"zero3_size and outer differ between ranks, in the group's order: {listed}"
        )
    if any(other[5] != every[0][5] for other in every):
        listed = ", ".join(str(bool(other[5])) for other in every)
        raise ValueError(
            "ReductionPolicy.separate_groups differs between ranks, in the group's order: "
            f"{listed}; give every rank the same"
        )
    if any(other[3] != every[0][3] for other in every):
        raise ValueError(
            "experts: the sizes of units, or which units are experts (have their own "
            f"process_group), differ between ranks; rank {dist.get_rank()} has "
            f"{'experts' if experts else 'no experts'}; every rank needs equally many experts of "
            "equal size"
        )
    if any(other[2] != every[0][2] for other in every):
        raise ValueError(
            "process_group: its ranks have different parts of the DTensor parameters: their "
            f"positions in the tensor-parallel mesh (-1: no DTensors) are {[e[2] for e in every]}, "
            "in the group's order; take both groups from one mesh: "
            'mesh = init_device_mesh(..., mesh_dim_names=("dp", "tp")), '
            'parallelize_module(..., mesh["tp"]), ZeRO3(..., process_group=mesh["dp"])'
        )
    if any((other[4] ^ every[0][4]) & 0xFFFFFFFF for other in every):
        raise ValueError(outline.explain(axes, device))
    agree_on_optional(optional, any(other[4] != every[0][4] for other in every), axes, device)
    if zero3_size is not None and len(axes) == 2 and zero3_size != num_inner:
        raise ValueError(
            f"zero3_size={zero3_size} contradicts the mesh (outer, inner) of "
            f"{num_outer, num_inner}, whose shard groups have {num_inner} ranks; leave out "
            "zero3_size"
        )
    if zero3_size is not None and (zero3_size < 1 or num_inner % zero3_size):
        raise ValueError(
            f"zero3_size: expected a divisor of the group size {num_inner}, got {zero3_size}"
        )
    has_outer = num_outer > 1 or zero3_size not in (None, num_inner)
    if outer != "zero1" and not has_outer:
        warn_once(
            f"outer={outer}",
            f"outer={outer!r} has no effect: the shard group is the whole group, so there is no "
            "outer group",
            is_first=not any(other.rank for other in axes) and not own[2] > 0,
            stacklevel=outside(),
        )


def _place_in(mesh: DeviceMesh) -> int:
    return mesh.mesh.flatten().tolist().index(dist.get_rank())
