"""shard_with_plan: applies a ShardingPlan to a model."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from layerzero.build.arguments import check_module
from layerzero.build.wrap import Choice, UnitPlan, has_forward
from layerzero.config import MixedPrecision
from layerzero.flat.groups import resolve_process_groups
from layerzero.notices import is_first_rank, warn_once
from layerzero.optional.arguments import optional_now
from layerzero.plan.activations import checkpoint_activations
from layerzero.plan.options import engine_arguments
from layerzero.plan.replicas import keep_buffers_equal
from layerzero.plan.resolve import Resolved, ResolvedUnit, resolve
from layerzero.plan.sharding_plan import ShardingPlan
from layerzero.step.root import root_of
from layerzero.step.unit import Unit, get_unit
from layerzero.step.unwrap import modules_of
from layerzero.zero3 import ZeRO3

logger = logging.getLogger(__name__)

Mesh = DeviceMesh | dist.ProcessGroup | None


def shard_with_plan(
    model: nn.Module, plan: ShardingPlan, mesh: Mesh = None, *, expert_mesh: Mesh = None
) -> ZeRO3:
    """Shard a model as a plan says. Collective over the mesh.

    A model may do this itself (`fully_shard`, `set_modules_to_prefetch`), and a shard group of one
    rank is plain data parallelism, which changes parameters: docs/reference/plans.md.

    Args:
        model: changed in place; unchanged if the plan has an error.
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
    resolved = resolve(plan, model)
    no_units = replace(plan, apply_modules=(), hook_modules=(), ep_plan=())
    if callable(getattr(model, "fully_shard", None)):
        resolve(no_units, model, has_own_units=True).raise_errors()
    own = _call_optional(model, "fully_shard", [plan], mesh=mesh, expert_mesh=expert_mesh)
    if own:
        resolved = resolve(no_units, model)
    resolved.raise_errors()
    resolved.warn(_is_first(mesh, model))
    sharded = own if isinstance(own, ZeRO3) else _shard(model, plan, mesh, experts, resolved)
    root_unit = get_unit(sharded)
    assert root_unit is not None, "sharded is a ZeRO3"
    if isinstance(own, ZeRO3):
        _check_optional(root_unit, resolved)
    if plan.pregather:
        root_of(root_unit).scheduler.unshards_all_before_forward = True
    depths = plan.num_forward, plan.num_backward
    if not _call_optional(root_unit.module, "set_modules_to_prefetch", [plan, *depths]):
        scheduler = root_of(root_unit).scheduler
        scheduler.forward_depth, scheduler.backward_depth = depths
        scheduler.make_room_for(max(depths))
    return sharded


def _check_optional(root_unit: Unit, resolved: Resolved) -> None:
    """Raise ValueError if the model wrapped itself without optional modules of the plan."""
    known = {part for module in optional_now(root_unit) for part in modules_of(module)}
    if not known.issuperset(resolved.optional_modules):
        wanted = [row.pattern for row in resolved.rows if row.key == "optional"]
        raise ValueError(
            f"shard_with_plan: {type(root_unit.module).__name__}.fully_shard wrapped the whole "
            f"model without all modules of the plan's optional {wanted}; pass them to its ZeRO3 "
            "(optional_modules)"
        )


def _is_first(mesh: Mesh, model: nn.Module) -> bool:
    """Whether this rank logs and warns for the ranks that share the model."""
    coordinates = [dist.get_rank(group) for group in resolve_process_groups(mesh)]
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            coordinates += parameter.device_mesh.get_coordinate() or ()
            break
    return not any(coordinates)


def _expert_arguments(plan: ShardingPlan, expert_mesh: Mesh) -> dict[str, Any]:
    """Arguments of expert units: the expert-data group, and the axis that numbers experts."""
    if plan.ep_plan and expert_mesh is None:
        raise ValueError(
            f"shard_with_plan: ep_plan={list(plan.ep_plan)} needs expert_mesh, the ranks that "
            "have the same experts; pass it, or leave out ep_plan"
        )
    if not plan.ep_plan and expert_mesh is not None:
        warn_once("shard_with_plan: expert_mesh has no effect: the plan names no experts (ep_plan)")
    axes = expert_mesh.mesh_dim_names or () if isinstance(expert_mesh, DeviceMesh) else ()
    arguments: dict[str, Any] = {"process_group": expert_mesh}
    if isinstance(expert_mesh, DeviceMesh) and "edp" in axes:
        arguments["process_group"] = expert_mesh["edp"]
    if plan.ep_plan and plan.local_experts:
        if not isinstance(expert_mesh, DeviceMesh) or "ep" not in axes:
            raise ValueError(
                "shard_with_plan: local_experts needs an expert_mesh with the axes 'edp' and 'ep', "
                f"whose ranks have different experts; got {expert_mesh!r}"
            )
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


def _shard(
    model: nn.Module,
    plan: ShardingPlan,
    mesh: Mesh,
    experts: Mapping[str, Any],
    resolved: Resolved,
) -> ZeRO3:
    if get_unit(model) is not None:
        raise RuntimeError(
            f"shard_with_plan: {type(model).__name__}.fully_shard sharded the whole model, but did "
            "not return the ZeRO3; return it, or shard only parts of the model"
        )
    arguments = _model_arguments(plan)
    own = {id(unit.module): _unit_arguments(plan, unit, experts) for unit in resolved.units}
    keeps_whole = False
    if "outer" not in arguments and not plan.ep_plan:
        units = resolved.units_of(model)
        keeps_whole = _keep_whole(plan, mesh, units, arguments, own)
    _checkpoint_activations(plan, resolved)

    def choose(module: nn.Module, fqn: str) -> Choice:
        return own.get(id(module), False)

    sharded = ZeRO3(
        model,
        mesh,
        auto_wrap_policy=choose if own else None,
        ignored_modules=resolved.ignored_modules,
        ignored_parameters=resolved.ignored_parameters,
        optional_modules=resolved.optional_modules,
        **arguments,
    )
    if keeps_whole and plan.broadcast_buffers:
        keep_buffers_equal(sharded, resolved.ignored_modules)
    return sharded


def _model_arguments(plan: ShardingPlan) -> dict[str, Any]:
    """Arguments of `ZeRO3` for the whole model."""
    arguments = engine_arguments(plan.options)
    arguments["mixed_precision"] = plan.mixed_precision
    # The default of `limit_all_gathers` follows from it.
    arguments["forward_prefetch"] = plan.num_forward
    if not plan.num_backward:
        arguments["backward_prefetch"] = None
    return arguments


def _unit_arguments(
    plan: ShardingPlan, unit: ResolvedUnit, experts: Mapping[str, Any]
) -> dict[str, Any]:
    """Arguments in which a unit differs from the whole model."""
    # `output_dtype` of the whole model does not apply to the outputs of a unit.
    arguments = engine_arguments(unit.options, replace(plan.mixed_precision, output_dtype=None))
    if unit.hook is not None:
        arguments["hook_module"] = unit.hook.module
    if unit.is_expert:
        arguments.update(experts)
    return arguments


def _checkpoint_activations(plan: ShardingPlan, resolved: Resolved) -> None:
    """Apply `act_ckpt`: a pattern's own, else the plan's to the outermost units."""
    default = plan.options.get("act_ckpt")
    outermost = [] if default is None else resolved.outermost_units()
    for unit in resolved.units:
        takes_default = unit in outermost and has_forward(unit.module)
        choice = unit.options.get("act_ckpt", default if takes_default else None)
        if choice is not None:
            checkpoint_activations(unit.module, choice)


def _keep_whole(
    plan: ShardingPlan,
    mesh: Mesh,
    units: Sequence[UnitPlan],
    arguments: dict[str, Any],
    own: Mapping[int, dict[str, Any]],
) -> bool:
    """If the shard group has one rank: cast the parameters, and replicate over the other ranks.

    Changes `arguments` and `own` to match.

    Returns:
        Whether the model is replicated, that is, other ranks have copies of it.
    """
    sizes = [group.size() for group in resolve_process_groups(mesh)]
    zero3_size = arguments.get("zero3_size")
    if (zero3_size or sizes[0]) != 1:
        return False
    num_ranks = sizes[0] * (sizes[1] if len(sizes) == 2 else 1)
    if any(o.parameter.is_meta for unit in units for o in unit.originals):
        # Meta parameters are initialised in their original dtype. Sharding keeps main weights of
        # that dtype, as a larger group would.
        return False
    if num_ranks > 1:
        arguments["outer"] = "replicate"
        arguments.setdefault("sync_module_states", True)
    num_cast = num_kept = 0
    for unit in units:
        of_unit = own.get(id(unit.module), {})
        precision = of_unit.get("mixed_precision", plan.mixed_precision)
        for original in unit.originals:
            parameter = original.parameter
            keeps = any(precision.keeps_float32(slot.module) for slot in original.slots)
            dtype = precision.compute_dtype(original.fqn, parameter.dtype, keeps)
            if is_of_adapter(original.fqn):
                num_kept += 1
            elif dtype != parameter.dtype:
                num_cast += 1
                parameter.data = parameter.data.to(dtype)
    for each in (arguments, *own.values()):
        if "mixed_precision" in each:
            each["mixed_precision"] = _keeping_adapters(each["mixed_precision"])
    if is_first_rank():
        logger.info(
            "shard_with_plan: the shard group has one rank, so nothing is sharded: plain data "
            "parallelism over %d ranks, %d parameters cast to their compute dtype, %d of "
            "low-rank adapters unchanged",
            num_ranks,
            num_cast,
            num_kept,
        )
    return num_ranks > 1


_ADAPTER = re.compile(
    "(?<![A-Za-z])(?i:lora)|(?<=[a-z])L(?:ora|oRA|ORA)|(?<![Ff])(?i:lora)(?![a-z])"
)
"""Matches "lora" where a word begins or ends: `lora_A`, `loraA`, `gateLora`, `adalora`; not
`flora`."""


def is_of_adapter(fqn: str) -> bool:
    return _ADAPTER.search(fqn) is not None


def _keeping_adapters(precision: MixedPrecision) -> MixedPrecision:
    users = precision.keep_parameters

    def keep(fqn: str) -> bool:
        return is_of_adapter(fqn) or (users is not None and users(fqn))

    return replace(precision, keep_parameters=keep)
