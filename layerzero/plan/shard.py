"""shard_with_plan: applies a ShardingPlan to a model."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from layerzero.plan.activations import checkpoint_activations
from layerzero.plan.options import engine_arguments
from layerzero.plan.resolve import Resolved, ResolvedUnit, optional_by_name
from layerzero.plan.sharding_plan import ShardingPlan
from layerzero.step.root import root_of
from layerzero.step.unit import get_unit
from layerzero.wrapping.refusals import check_module, has_forward
from layerzero.wrapping.zero3 import ZeRO3

Mesh = DeviceMesh | dist.ProcessGroup | None


def shard_with_plan(
    model: nn.Module, plan: ShardingPlan, mesh: Mesh = None, *, expert_mesh: Mesh = None
) -> ZeRO3:
    """Shard a model as a plan says. Collective over the mesh.

    A model may do this itself (`fully_shard`, `set_modules_to_prefetch`): docs/reference/plans.md.

    Args:
        model: changed in place; unchanged if a pattern does not fit it.
        plan: see docs/reference/plans.md.
        mesh: what `ZeRO3` calls `process_group`: a DeviceMesh of one axis, or two (outer, shard
            group), a process group, or None for all ranks.
        expert_mesh: the ranks that have the same experts, for the units that `ep_plan` names: a
            process group, a DeviceMesh whose axis "edp" is taken, or a mesh as for `mesh`. With
            `local_experts` in the plan it needs an axis "ep" as well.

    Raises:
        ValueError, TypeError: the plan does not fit the model (the message lists near matches), or
            has an `ep_plan` without an `expert_mesh`.
        RuntimeError: the model is sharded already. (A submodule that is sharded already is skipped
            with a warning.)
    """
    if not isinstance(plan, ShardingPlan):
        raise TypeError(f"shard_with_plan: expected a ShardingPlan, got {plan!r}")
    check_module(model)
    experts = _expert_arguments(plan, expert_mesh)
    own = _call_optional(model, "fully_shard", [plan], mesh=mesh, expert_mesh=expert_mesh)
    if isinstance(own, ZeRO3):
        sharded = own
    elif own:  # The model has made its units.
        rest = replace(plan, apply_modules=(), hook_modules=(), ep_plan=())
        sharded = _shard(model, rest, mesh, {})
    else:
        sharded = _shard(model, plan, mesh, experts)
    root_unit = get_unit(sharded)
    assert root_unit is not None, "sharded is a ZeRO3"
    scheduler = root_of(root_unit).scheduler
    scheduler.unshards_all_before_forward = plan.pregather
    depths = plan.num_forward, plan.num_backward
    if not _call_optional(root_unit.module, "set_modules_to_prefetch", [plan, *depths]):
        scheduler.forward_depth, scheduler.backward_depth = depths
        root_unit.context.limiter.make_room_for(max(depths))
    return sharded


def _expert_arguments(plan: ShardingPlan, expert_mesh: Any) -> dict[str, Any]:
    """Arguments of expert units: the expert-data group, and the axis that numbers experts."""
    if plan.ep_plan and expert_mesh is None:
        raise ValueError(
            f"shard_with_plan: ep_plan={list(plan.ep_plan)} needs expert_mesh, the ranks that "
            "have the same experts; pass it, or leave out ep_plan"
        )
    axes = expert_mesh.mesh_dim_names or () if isinstance(expert_mesh, DeviceMesh) else ()
    arguments = {"process_group": expert_mesh["edp"] if "edp" in axes else expert_mesh}
    if plan.ep_plan and plan.local_experts:
        arguments["expert_numbers"] = expert_mesh["ep"]
    return arguments


def _call_optional(model: nn.Module, name: str, arguments: list[Any], **optional: Any) -> Any:
    """Call a method that the model may define; None if it does not.

    Args:
        arguments: positional; the first is the plan. MindSpeed-MM's form of the method has names
            for the parts of it instead.
        optional: arguments passed only if the method's signature has them.
    """
    method = getattr(model, name, None)
    if not callable(method):
        return None
    accepted = inspect.signature(method).parameters
    parts = dict.fromkeys(accepted.keys() & {"fsdp_plan", "ep_plan"}, arguments[0])
    given = {**parts, **{key: value for key, value in optional.items() if key in accepted}}
    return method(*([] if parts else arguments), **given)


def _shard(model: nn.Module, plan: ShardingPlan, mesh: Mesh, experts: Mapping[str, Any]) -> ZeRO3:
    resolved = Resolved(plan, model)
    resolved.raise_or_warn()
    own = {id(unit.module): _unit_arguments(plan, unit, experts) for unit in resolved.units}
    _checkpoint_activations(plan, resolved.units)

    arguments = engine_arguments(plan.options)
    arguments["mixed_precision"] = plan.mixed_precision
    # The default of `limit_all_gathers` follows from it.
    arguments["forward_prefetch"] = plan.num_forward
    if not plan.num_backward:
        arguments["backward_prefetch"] = None
    return ZeRO3(
        model,
        mesh,
        auto_wrap_policy=(lambda module, fqn: own.get(id(module), False)) if own else None,
        ignored_modules=resolved.ignored_modules,
        ignored_parameters=resolved.ignored_parameters,
        optional_modules=optional_by_name(model, plan.optional),
        **arguments,
    )


def _unit_arguments(
    plan: ShardingPlan, unit: ResolvedUnit, experts: Mapping[str, Any]
) -> dict[str, Any]:
    """Arguments in which a unit differs from the whole model."""
    # `output_dtype` of the whole model does not apply to the outputs of a unit.
    arguments = engine_arguments(unit.options, replace(plan.mixed_precision, output_dtype=None))
    if unit.hook is not None:
        arguments["hook_module"] = unit.hook
    return {**arguments, **experts} if unit.is_expert else arguments


def _checkpoint_activations(plan: ShardingPlan, units: Sequence[ResolvedUnit]) -> None:
    """Apply `act_ckpt`: a pattern's own, else the plan's to the outermost units."""
    default = plan.options.get("act_ckpt")
    around = ""
    for unit in units:
        is_inside = around and unit.fqn.startswith(around)
        around = around if is_inside else f"{unit.fqn}."
        choice = unit.options.get("act_ckpt", None if is_inside else default)
        if choice is not None and has_forward(unit.module):
            checkpoint_activations(unit.module, choice)
