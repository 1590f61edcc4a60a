"""Compares the plans of all ranks and makes the process groups, before any unit is built."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from layerzero.build.arguments import Arguments
from layerzero.build.compare import REFUSED, Exchange, hash_of
from layerzero.build.plan import FindFeatures, Group, WrapPlan, plan_wrapping
from layerzero.comm.new_groups import agree_on_group_names, new_group, options_like
from layerzero.flat.groups import (
    is_timeout,
    make_shard_group,
    make_shard_groups,
    mesh_groups,
    resolve_process_groups,
)
from layerzero.flat.placement import Outer, Placement, ShardGroup

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


def _axes_of(
    process_group: dist.ProcessGroup | DeviceMesh | None,
    timeout: timedelta | None,
    device: torch.device | None,
) -> tuple[list[ShardGroup], torch.device]:
    """The group (of a mesh: the inner and the outer ones), and the device for the first exchange.

    That is the host where a backend of the group serves it, because ranks may differ in the device.
    Raises as `make_shard_groups`; not collective.

    Args:
        device: where the parameters will be; None: it is unknown.
    """
    config = dist.get_backend_config(resolve_process_groups(process_group)[0])
    kinds = [part.partition(":")[0] for part in config.split(",")]
    if "cpu" in kinds:
        device = torch.device("cpu")
    elif device is None:
        device = torch.device(kinds[0])
    return make_shard_groups(process_group, device, timeout), device


_WHAT = "arguments and parameters of ranks"


def plan_on_every_rank(
    module: nn.Module,
    given: Mapping[str, Any],
    check: Callable[[], tuple[Arguments, Sequence[nn.Module | nn.Parameter]]],
    find_features: FindFeatures,
) -> tuple[WrapPlan, Arguments]:
    """Check the arguments and plan the units; if a rank refuses, all raise. Changes nothing.

    Collective over the model's ranks only if this rank refuses: its exchange is then the one in
    `agree_on_topology` of the others.

    Args:
        given: the arguments of `ZeRO3` by name.
        check: returns them checked, and what wrapped models inside ignore; or raises.

    Raises:
        ValueError, TypeError, RuntimeError, NotImplementedError: as `check` and `plan_wrapping`. A
            rank whose `process_group` is refused raises alone.
    """
    try:
        arguments, nested_ignored = check()
        plan = plan_wrapping(module, arguments, find_features, nested_ignored)
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
        axes, device = _axes_of(given["process_group"], timeout if is_usable else None, None)
        exchange = Exchange(axes, device, _WHAT)
        exchange.bounds(REFUSED)
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
    axes, exchange_device = _axes_of(given.process_group, given.timeout, plan.device)
    exchange = Exchange(axes, exchange_device, _WHAT)
    rows: dict[str, Sequence[str]] = {}
    for compared in plan.extensions.compared:
        rows |= compared()
    low, high = exchange.bounds(hash_of(rows))
    if low == REFUSED:
        rank, text = next(iter(exchange.texts(None).items()))
        raise ValueError(f"rank {rank} refused the module or an argument of ZeRO3: {text}")
    if low != high:
        exchange.refuse_difference("ZeRO3", rows)
    check_sizes(axes, given.zero3_size)
    agree_on_group_names(axes, exchange_device)
    make = functools.partial(_make_placement, plan.device, given)
    placement = make(given.process_group, given.zero3_size)
    groups = mesh_groups(plan.mesh, plan.device, given.timeout)
    placements = {id(unit): placement for unit in plan.units}
    for place in plan.extensions.place:
        placements |= place(placement, make, plan.device)
    return Topology(placement=placement, placements=placements, tensor_parallel_groups=groups)


def check_sizes(axes: Sequence[ShardGroup], zero3_size: int | None) -> None:
    """Raise ValueError if `zero3_size` does not fit."""
    if zero3_size is None:
        return
    size, is_mesh = axes[0].size, len(axes) == 2
    if zero3_size != size and (is_mesh or zero3_size < 1 or size % zero3_size):
        expected = f"{size} as in the mesh" if is_mesh else f"a divisor of the group size {size}"
        raise ValueError(f"zero3_size: expected {expected}, got {zero3_size}")


def _make_placement(
    device: torch.device, given: Arguments, group: Group | None, zero3_size: int | None = None
) -> Placement:
    """Place shards for tensors on `device`. Collective where groups have to be made.

    All ranks must have made equally many process groups: comm/new_groups.py.

    Args:
        group: all ranks, cut into shard groups of `zero3_size` neighbours; or a 2-D mesh
            (outer, inner), which defines both axes.
        zero3_size: a divisor of the group's size, the same on every rank; None: all of it.

    Raises:
        ValueError: this rank is not in the group or mesh.
    """
    groups = make_shard_groups(group, device, given.timeout)
    if isinstance(group, DeviceMesh) and group.ndim == 2:
        table = group.mesh.tolist()
    else:
        # Neighbours in the order of global ranks, which is that of every process group made here.
        ranks, size = sorted(groups[0].ranks), zero3_size or groups[0].size
        table = [ranks[start : start + size] for start in range(0, len(ranks), size)]
    in_order = given.deterministic
    placement = place(
        table, dist.get_rank(), given.outer, in_order, lambda r: _group_of(r, groups, device)
    )
    if not given.reduction.separate_groups:
        return placement
    lane = (_group_of(g.ranks, groups, device, "reduce") for g in placement.reduce_groups)
    return dataclasses.replace(placement, reduce_lane=tuple(lane))


def place(
    table: list[list[int]],
    rank: int,
    outer: Outer,
    deterministic: bool,
    group_of: Callable[[Sequence[int]], ShardGroup],
) -> Placement:
    """The placement of `rank`; `group_of` finds or makes groups, in the same order on every rank.

    Args:
        table: global ranks, one row for each shard group.
    """
    members = tuple(sorted(itertools.chain.from_iterable(table)))
    if len(table) == 1:
        return Placement(group_of(members), None, 1, members)
    row = next(row for row in table if rank in row)
    if outer == "shard":
        everyone = group_of(members)
        return Placement(everyone, None, 1, members, post_forward_group=group_of(row))
    column = [row_of_peer[row.index(rank)] for row_of_peer in table]
    world = group_of(members) if deterministic else None
    # See Note [Ownership is strided].
    slices = {r: j * len(table) + k for k, row in enumerate(table) for j, r in enumerate(row)}
    return Placement(
        shard_group=group_of(row),
        outer_group=group_of(column),
        owned_slices=len(column) if outer == "replicate" else 1,
        members=members,
        world=world,
        world_slices=() if world is None else tuple(slices[rank] for rank in world.ranks),
    )


_made: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, tuple[int, ...]], dist.ProcessGroup]]
_made = WeakKeyDictionary()
"""Groups made for parts of a group or mesh, by lane and ranks, for the next model on it."""


def _group_of(
    ranks: Sequence[int], groups: list[ShardGroup], device: torch.device, lane: str = ""
) -> ShardGroup:
    """These ranks as a group: one of `groups`, one made before, or a new one. Collective.

    Args:
        lane: "reduce": a group for reductions alone, never one of `groups`.
    """
    wanted = tuple(sorted(ranks))
    for group in groups:
        if not lane and tuple(sorted(group.ranks)) == wanted:
            return group
    parent = groups[0]
    made = _made.setdefault(parent.process_group, {})
    if (lane, wanted) not in made:
        made[lane, wanted] = new_group(
            wanted,
            dist.get_backend_config(parent.process_group),
            parent.timeout,
            options_like(parent.process_group, device),
        )
    # Its own timeout is that of the first model it was made for.
    return make_shard_group(made[lane, wanted], device, parent.timeout)
