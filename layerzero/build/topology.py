"""Compares the plans of all ranks and makes the process groups, before any unit is built."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from layerzero.build.arguments import Arguments, check_arguments
from layerzero.build.compare_models import Outline
from layerzero.build.make_placement import make_placement
from layerzero.build.plan import WrapPlan, plan_wrapping
from layerzero.comm.collectives import gather_small
from layerzero.comm.gather_texts import gather_texts
from layerzero.comm.new_groups import agree_on_group_names
from layerzero.comm.pending import Operation
from layerzero.flat.groups import (
    ShardGroup,
    is_timeout,
    make_shard_groups,
    mesh_groups,
    resolve_process_groups,
)
from layerzero.flat.placement import Placement
from layerzero.notices import outside, warn_once

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Over which ranks a model's units are sharded."""

    placement: Placement
    """Placement of the whole model."""
    placements: Mapping[int, Placement]
    """Placement of each unit, keyed by id(plan); experts have one of their own."""
    tensor_parallel_groups: tuple[ShardGroup, ...]
    """One group for each axis of the DTensors' mesh."""


class Exchange:
    """The first exchange of construction: a row of integers from every rank to every rank.

    It runs on the host where a backend of the group serves the CPU, because ranks may differ in
    the device.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | DeviceMesh | None,
        timeout: timedelta | None,
        device: torch.device | None,
    ) -> None:
        """Raises as `resolve_process_groups` and `describe_group`; not collective.

        Args:
            device: where the parameters will be; None: it is unknown.
        """
        groups = resolve_process_groups(process_group)
        backends = dist.get_backend_config(groups[0])
        kinds = [part.partition(":")[0] for part in backends.split(",")]
        self.device = torch.device("cpu")
        if "cpu" not in kinds:
            self.device = torch.device(kinds[0]) if device is None else device
        self.axes = make_shard_groups(process_group, self.device, timeout)
        """One group, or a mesh's inner and outer ones."""

    def __call__(self, row: _Row) -> list[_Row]:
        """The rows of all ranks, in order; only the first if they differ in nothing but `rank`.

        Collective; blocks the host.
        """
        values = torch.tensor(row, device=self.device)
        for axis in self.axes:
            if axis.size > 1:
                values = gather_small(values, axis, _EXCHANGE)
        rows = values.view(-1, len(row))
        if torch.equal(rows[1:, 1:], rows[:-1, 1:]):  # No work in Python for each rank.
            rows = rows[:1]
        return [_Row(*each) for each in rows.tolist()]

    def texts(self, text: str | None) -> dict[int, str]:
        """The texts of the ranks that have one, by rank. Collective; blocks the host."""
        return gather_texts(text, dist.get_rank(), self.axes, self.device, _EXCHANGE.unit)


class _Row(NamedTuple):
    """Row of integers that each rank sends to all others."""

    rank: int
    is_refused: bool = False
    """The rank refused the module or an argument; then the rest does not count."""
    place: int = -1
    """Its position in the mesh of the DTensor parameters; -1: there are none."""
    experts: int = 0
    """Checksum from `structure_of` (experts.py)."""
    outline: int = 0
    optional: int = 0


_EXCHANGE = Operation("exchange", "arguments and parameters of ranks", 0)


def plan_on_every_rank(
    module: nn.Module, given: Mapping[str, Any], unknown: Mapping[str, Any]
) -> tuple[WrapPlan, Arguments]:
    """Check the arguments and plan the units; if a rank refuses, all raise. Changes nothing.

    Collective over the model's ranks only if this rank refuses: its exchange is then the one in
    `agree_on_topology` of the others.

    Args:
        given: the arguments of `ZeRO3` by name.
        unknown: keyword arguments that `ZeRO3` does not have.

    Raises:
        ValueError, TypeError, RuntimeError, NotImplementedError: as `check_arguments` and
            `plan_wrapping`. A rank whose `process_group` is refused raises alone.
    """
    try:
        arguments = check_arguments(given, unknown)
        plan = plan_wrapping(module, arguments)
        make_shard_groups(arguments.process_group, plan.device, arguments.timeout)
    except Exception as error:
        _refuse(given, error)
        raise
    return plan, arguments


def _refuse(given: Mapping[str, Any], error: Exception) -> None:
    """Let the other ranks raise as well. Collective, if this rank has its group."""
    timeout = given["timeout"]
    is_usable = isinstance(timeout, timedelta) and is_timeout(timeout)
    try:
        exchange = Exchange(given["process_group"], timeout if is_usable else None, None)
        exchange(_Row(dist.get_rank(), is_refused=True))
        exchange.texts(f"{type(error).__name__}: {error}")
    except Exception as other:  # This rank raises `error` in any case.
        _logger.debug("cannot send %r to other ranks: %s", error, other)


def agree_on_topology(plan: WrapPlan, given: Arguments) -> Topology:
    """Compare arguments and plans of all ranks, and make the groups.

    Collective over the model's ranks; blocks the host.

    Raises:
        ValueError: on every rank: arguments or models differ between ranks, or do not fit.
        CollectiveError: a rank did not take part.
    """
    device, timeout, mode = plan.device, given.timeout, given.outer
    exchange = Exchange(given.process_group, timeout, device)
    _check_agreement(exchange, plan, given)
    agree_on_group_names(exchange.axes, exchange.device)
    separate, in_order = given.reduction.separate_groups, given.reduction.deterministic
    placement = make_placement(
        given.process_group, device, given.zero3_size, mode, in_order, timeout, separate
    )
    groups = mesh_groups(plan.mesh, device, timeout)
    placements = {id(unit): placement for unit in plan.units}
    if plan.experts:
        from layerzero.build.experts import check_experts, place_units

        check_experts(plan.units, plan.experts, placement, device)
        placements |= place_units(
            plan.experts, placement, device, mode, in_order, timeout, separate
        )
    return Topology(placement=placement, placements=placements, tensor_parallel_groups=groups)


def _check_agreement(exchange: Exchange, plan: WrapPlan, given: Arguments) -> None:
    """Raise if ranks differ, or if their arguments do not fit. Collective over the model's ranks.

    Raises:
        ValueError: on every rank; names the first difference, its ranks and both values.
        TypeError: as refused for `optional_modules`; other ranks then raise ValueError.
        CollectiveError: a rank did not take part.
    """
    axes, device = exchange.axes, exchange.device
    num_inner = axes[0].size
    outline = Outline(plan, given, num_inner)
    structure = 0
    if plan.experts:
        from layerzero.build.experts import structure_of

        structure = structure_of(plan.units, plan.experts)
    own = _Row(
        rank=dist.get_rank(),
        place=-1 if plan.mesh is None else _place_in(plan.mesh),
        experts=structure,
        outline=outline.number,
        optional=0 if plan.optional is None else plan.optional.number,
    )
    every = exchange(own)
    if any(row.is_refused for row in every):
        rank, text = next(iter(exchange.texts(None).items()))
        raise ValueError(f"rank {rank} refused the module or an argument of ZeRO3: {text}")
    first = every[0]
    if any(row.experts != first.experts for row in every):
        raise ValueError(
            "experts: the sizes of units, or which units are experts (have their own "
            f"process_group), differ between ranks; rank {own.rank} has "
            f"{'experts' if own.experts else 'no experts'}; every rank needs equally many experts "
            "of equal size"
        )
    if any(row.place != first.place for row in every):
        raise ValueError(
            "process_group: its ranks have different parts of the DTensor parameters: their "
            f"positions in the tensor-parallel mesh (-1: no DTensors) are "
            f"{[row.place for row in every]}, "
            "in the group's order; take both groups from one mesh: "
            'mesh = init_device_mesh(..., mesh_dim_names=("dp", "tp")), '
            'parallelize_module(..., mesh["tp"]), ZeRO3(..., process_group=mesh["dp"])'
        )
    if any(row.outline != first.outline for row in every):
        raise ValueError(outline.explain(first.rank, axes, device))
    differs = any(row.optional != first.optional for row in every)
    if differs or plan.optional is not None:
        from layerzero.build.optional import OptionalModules, agree_on_optional

        agree_on_optional(plan.optional or OptionalModules(), differs, axes, device)
    check_sizes(axes, given, is_first=not any(axis.rank for axis in axes) and own.place <= 0)


def check_sizes(axes: Sequence[ShardGroup], given: Arguments, is_first: bool) -> None:
    """Raise ValueError if `zero3_size` does not fit; warn, on one rank, if `outer` does nothing."""
    num_inner, num_outer = axes[0].size, axes[1].size if len(axes) == 2 else 1
    zero3_size, outer = given.zero3_size, given.outer
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
            is_first=is_first,
            stacklevel=outside(),
        )


def _place_in(mesh: DeviceMesh) -> int:
    return mesh.mesh.flatten().tolist().index(dist.get_rank())
