"""Experts in a plan: units whose `process_group` is the ranks that have the same ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from layerzero.build.plan import AnyGroup, Ranks, WrapPlan, ranks_of
from layerzero.build.topology import place
from layerzero.flat.placement import Outer, Placement, ShardGroup

Policy = Callable[[nn.Module, str], Any]


def with_ranks(policy: Policy) -> Policy:
    """`policy`, whose process groups are `Ranks`, and whose experts have no numbers.

    What it returns may have a sequence of global ranks for a `process_group`. Numbers give names to
    experts, and no plan asks for them.
    """

    def choose(module: nn.Module, fqn: str) -> Any:
        choice = policy(module, fqn)
        if not isinstance(choice, Mapping) or choice.get("process_group") is None:
            return choice
        where = f"plan_memory: process_group of {fqn!r}"
        table = _table(choice["process_group"], where)
        return {**choice, "process_group": Ranks(table), "expert_numbers": None}

    return choose


def _table(group: Any, where: str) -> tuple[tuple[int, ...], ...]:
    if isinstance(group, DeviceMesh) and group.ndim == 2:
        return tuple(map(tuple, group.mesh.tolist()))
    if isinstance(group, (DeviceMesh, dist.ProcessGroup)):
        return (ranks_of(group),)
    is_list = isinstance(group, Sequence) and not isinstance(group, str)
    if not is_list or any(isinstance(r, bool) or not isinstance(r, int) for r in group):
        raise TypeError(
            f"{where}: expected the global ranks that have the same experts, or a ProcessGroup or "
            f"DeviceMesh of them, got {group!r}"
        )
    if not group or len(set(group)) < len(group):
        raise ValueError(f"{where}: expected different ranks, at least one, got {list(group)}")
    return (tuple(sorted(group)),)


def with_all_experts(experts: Mapping[int, AnyGroup], world_size: int) -> Collection[int]:
    """The ranks that have all of these experts; rising.

    Raises:
        ValueError: there is none.
    """
    common = set(range(world_size)).intersection(*map(ranks_of, experts.values()))
    if not common:
        raise ValueError(
            "plan_memory: no rank is in the process_group of all experts; plan the module of one "
            "rank, with its own experts"
        )
    return range(world_size) if len(common) == world_size else sorted(common)


def placements_of(
    plan: WrapPlan,
    whole: Placement,
    rank: int,
    outer: Outer,
    in_order: bool,
    group_of: Callable[[Sequence[int]], ShardGroup],
) -> dict[int, Placement]:
    """The placement of each unit, keyed by id(plan); `whole` is that of the model."""
    made: dict[AnyGroup, Placement] = {}
    for group in plan.groups.values():
        assert isinstance(group, Ranks), "made by `with_ranks`"
        table = [list(row) for row in group.table]
        own = place(table, rank, outer, in_order, group_of)
        if whole.reduce_lane:
            own = replace(own, reduce_lane=own.reduce_groups)
        made[group] = replace(own, members=whole.members, data_parallel=whole)
    return {
        id(unit): made[plan.groups[id(unit)]] if id(unit) in plan.groups else whole
        for unit in plan.units
    }
