"""Plans one `ZeRO3` call on this rank: the units, their arguments and the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from layerzero.build.arguments import Arguments, UnitArguments, effective_offload
from layerzero.build.device import resolve_device, tensor_parallel_mesh
from layerzero.build.make_placement import AnyGroup, ranks_of
from layerzero.build.shared_memory import refuse_shared_memory
from layerzero.build.wrap import UnitPlan, Visit, has_forward, plan_units
from layerzero.config import MixedPrecision
from layerzero.flat.names import clean_name
from layerzero.step.module_guards import check_compiled, units_of
from layerzero.step.structure import Ignored
from layerzero.step.unit import get_unit

if TYPE_CHECKING:
    from layerzero.build.expert_numbers import ExpertLists
    from layerzero.build.optional import OptionalModules


_Named = tuple[str, nn.Parameter]


@dataclass(frozen=True, kw_only=True)
class WrapPlan:
    """The units that a module will have, before ranks compare their plans."""

    units: list[UnitPlan]
    """Outermost first."""
    visits: list[Visit]
    """Modules that are not ignored, in module order."""
    device: torch.device
    arguments: Mapping[int, UnitArguments]
    """Arguments of each unit, keyed by id(plan)."""
    experts: Mapping[int, AnyGroup]
    """The expert-data group of each expert unit, keyed by id(plan)."""
    expert_lists: ExpertLists | None
    """None: no unit has `expert_numbers`."""
    mesh: DeviceMesh | None
    """Mesh of the DTensor parameters outside experts."""
    ignored: Ignored
    ignored_parameters: Sequence[nn.Parameter]
    """The `ignored_parameters` given; after an unwrap, the full parameters that replaced them."""
    optional: OptionalModules | None
    """None: no module is optional."""

    @property
    def nesting(self) -> int:
        """Depth of the deepest unit; the root counts as 1."""
        return max(len(list(unit.ancestors())) for unit in self.units)


def plan_wrapping(
    module: nn.Module, given: Arguments, everyone: Callable[[], tuple[int, ...]] | None = None
) -> WrapPlan:
    """Find the units of `module`. Changes nothing and is not collective, with one exception.

    A module whose wrapper is gone is unwrapped first, which is collective.

    Args:
        everyone: returns the ranks that share a model that is only planned; None: those of
            `given.process_group`.

    Raises:
        ValueError, TypeError: a bad policy or argument of one unit, or a parameter that cannot be
            sharded.
        NotImplementedError: both experts and other units have DTensors.
        RuntimeError: units inside belong to another wrapped model.
    """
    ignored_parameters: Sequence[nn.Parameter] = given.ignored_parameters
    ignored = Ignored(given.ignored_modules, ignored_parameters)
    is_nested = any(get_unit(part) is not None or units_of(part) for part in module.modules())
    if is_nested:
        from layerzero.step.unwrap import left_units, nested_ignored, unwrap

        left = left_units(module)
        if left:
            full = unwrap(left)
            ignored_parameters = [full.get(id(each), each) for each in ignored_parameters]
        ignored = nested_ignored(module).and_also(given.ignored_modules, ignored_parameters)
    units, visits = plan_units(module, given.auto_wrap_policy, ignored.modules, ignored.parameters)
    _check_containers(units)

    def everyone_here() -> tuple[int, ...]:
        return ranks_of(given.process_group)

    ranks = everyone or everyone_here
    experts: Mapping[int, AnyGroup] = {}
    expert_lists = None
    own = {name for unit in units for name in unit.arguments}
    if "process_group" in own:
        from layerzero.build.experts import find_experts

        experts = find_experts(units, ranks)
    if "expert_numbers" in own:
        from layerzero.build.expert_numbers import ExpertLists

        expert_lists = ExpertLists(module, units)
    dense = [unit for unit in units if id(unit) not in experts]
    optional = None
    is_default = isinstance(given.optional_modules, tuple) and not given.optional_modules
    if is_nested or not is_default or given.optional_mean != "all":
        from layerzero.build.optional import find_optional

        optional = find_optional(
            module, given.optional_modules, given.optional_mean, units, experts, ranks
        )
    mesh = tensor_parallel_mesh(dense, None if everyone else everyone_here)
    device = resolve_device(given.device, units, given.group, mesh)
    sharded = [(each.fqn, each.parameter) for unit in units for each in unit.originals]
    refuse_shared_memory(sharded, _others(module, ignored, sharded))
    check_compiled(((visit.fqn, visit.module) for visit in visits), device)
    return WrapPlan(
        units=units,
        visits=visits,
        device=device,
        arguments=_arguments_of(units, given, device),
        experts=experts,
        expert_lists=expert_lists,
        mesh=mesh,
        ignored=ignored,
        ignored_parameters=ignored_parameters,
        optional=optional,
    )


def _others(module: nn.Module, ignored: Ignored, sharded: Sequence[_Named]) -> list[_Named]:
    """The parameters that are not to be sharded, with their names."""
    if not ignored.modules and not ignored.parameters:
        return []
    inside = {id(parameter) for _, parameter in sharded}
    # Bypass an override, which may return less.
    named = nn.Module.named_parameters(module)
    return [(clean_name(name), each) for name, each in named if id(each) not in inside]


def _arguments_of(
    units: Sequence[UnitPlan], given: Arguments, device: torch.device
) -> dict[int, UnitArguments]:
    shared = UnitArguments(
        mixed_precision=given.mixed_precision or MixedPrecision(),
        reshard_after_forward=given.reshard_after_forward,
        gradient_reduction=given.reduction.reduce,
        offload=effective_offload(given.offload, device),
    )
    arguments = {id(unit): shared.of_unit(unit, device) for unit in units}
    if given.root_precision is not None:
        root = id(units[0])
        arguments[root] = replace(arguments[root], mixed_precision=given.root_precision)
    return arguments


_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def _check_containers(plans: Sequence[UnitPlan]) -> None:
    """Raise ValueError for a unit that cannot be called, because nothing would unshard it.

    That is a list or dict of modules or parameters that would own parameters.
    """
    for plan in plans:
        if plan.existing is not None or plan.arguments.get("hook_module") is not None:
            continue
        is_container = isinstance(plan.module, _CONTAINERS) and not has_forward(plan.module)
        if is_container and plan.originals:
            name = type(plan.module).__name__
            raise ValueError(
                f"{plan.label}: a {name} has no forward, so its parameters, such as "
                f"{plan.originals[0].fqn!r}, would never be gathered; make its members units "
                "(auto_wrap_policy={TheirClass}), or a module around it that is called"
            )
