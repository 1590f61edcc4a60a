"""Plans one `ZeRO3` call on this rank: the units, their arguments and the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from layerzero.build.arguments import Arguments, UnitArguments, effective_offload
from layerzero.build.device import resolve_device, tensor_parallel_mesh
from layerzero.build.wrap import UnitPlan, Visit, plan_units
from layerzero.config import MixedPrecision
from layerzero.step.extension import Extension, Extensions
from layerzero.step.ignored import Ignored

Group = dist.ProcessGroup | DeviceMesh


@dataclass(frozen=True)
class Ranks:
    """Stands for a process group where there is none: in a plan of memory."""

    table: tuple[tuple[int, ...], ...]
    """Global ranks, one row for each shard group."""


AnyGroup = Group | Ranks


def ranks_of(group: AnyGroup | None) -> tuple[int, ...]:
    """Global ranks in ascending order."""
    if isinstance(group, Ranks):
        return tuple(sorted(rank for row in group.table for rank in row))
    if isinstance(group, DeviceMesh):
        return tuple(sorted(group.mesh.flatten().tolist()))
    return tuple(sorted(dist.get_process_group_ranks(group)))


FindFeatures = Callable[
    [nn.Module, Arguments, Sequence[UnitPlan], tuple[int, ...]], list[Extension]
]
"""Takes the module, the arguments, the units, and the ranks that share the model."""


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
    extensions: Extensions
    """Features that take part in construction."""
    groups: Mapping[int, AnyGroup]
    """The ranks of each unit that only some have (experts), keyed by id(plan)."""
    mesh: DeviceMesh | None
    """Mesh of the DTensor parameters in the other units."""
    ignored: Ignored

    @property
    def nesting(self) -> int:
        """Depth of the deepest unit; the root counts as 1."""
        return max(len(list(unit.ancestors())) for unit in self.units)


def plan_wrapping(
    module: nn.Module,
    given: Arguments,
    find_features: FindFeatures,
    nested_ignored: Iterable[nn.Module | nn.Parameter] = (),
    planned_for: tuple[int, ...] | None = None,
) -> WrapPlan:
    """Find the units of `module`. Changes nothing; not collective.

    Args:
        nested_ignored: what wrapped models inside ignore.
        planned_for: the ranks that share a model that is only planned; None: those of
            `given.process_group` share it.

    Raises:
        ValueError, TypeError: a bad policy or argument of one unit, or a parameter that cannot be
            sharded.
        NotImplementedError: both experts and other units have DTensors.
    """
    ignored = Ignored([*nested_ignored, *given.ignored_modules, *given.ignored_parameters])
    units, visits = plan_units(module, given.auto_wrap_policy, ignored.modules, ignored.parameters)
    everyone = planned_for or ranks_of(given.process_group)
    extensions = Extensions(find_features(module, given, units, everyone))
    groups = {plan: group for groups in extensions.groups for plan, group in groups().items()}
    dense = [unit for unit in units if id(unit) not in groups]
    mesh = tensor_parallel_mesh(dense, None if planned_for else everyone)
    device = resolve_device(given.device, units, given.process_group, mesh)
    return WrapPlan(
        units=units,
        visits=visits,
        device=device,
        arguments=_arguments_of(units, given, device),
        extensions=extensions,
        groups=groups,
        mesh=mesh,
        ignored=ignored,
    )


def _arguments_of(
    units: Sequence[UnitPlan], given: Arguments, device: torch.device
) -> dict[int, UnitArguments]:
    shared = UnitArguments(
        mixed_precision=given.mixed_precision or MixedPrecision(),
        reshard_after_forward=given.reshard_after_forward,
        gradient_reduction=given.gradient_reduction,
        offload=effective_offload(given.offload, device),
    )
    arguments = {id(unit): shared.of_unit(unit, device) for unit in units}
    if given.root_precision is not None:
        root = id(units[0])
        arguments[root] = replace(arguments[root], mixed_precision=given.root_precision)
    return arguments
