"""Puts the features that arguments call for into a model; the engine below knows none of them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from layerzero import guards
from layerzero.build.arguments import Arguments, check_arguments
from layerzero.build.plan import AnyGroup, WrapPlan
from layerzero.build.topology import Topology
from layerzero.build.wrap import UnitPlan
from layerzero.config import size_text
from layerzero.flat.groups import resolve_process_groups
from layerzero.flat.parameter_info import get_info
from layerzero.module_tree.awaited_values import AwaitedValues
from layerzero.module_tree.conversions import guard
from layerzero.module_tree.structure import Structure
from layerzero.notices import some, warn_once
from layerzero.optim import norm, steps
from layerzero.optim.sharded_params import live_roots
from layerzero.state_dict import module_state
from layerzero.state_dict.torch_gather import patch_torch
from layerzero.step.extension import Extension, Extensions
from layerzero.step.methods import shown_by
from layerzero.step.root import RootState, root_if_alive
from layerzero.step.unit import Unit, get_unit
from layerzero.verify.same_plan import SamePlan, plain
from layerzero.verify.start_values import StartValues
from layerzero.wrapping.refusals import check_module, refuse

_logger = logging.getLogger("layerzero.log")
_LIBRARIES = ("transformers", "diffusers", "peft", "huggingface_hub")
"""Libraries whose models have methods that would take shards for whole parameters."""
_OF_EXPERTS = {"process_group", "expert_numbers"}
"""Arguments of units that are experts."""


def checked(
    module: nn.Module, given: Mapping[str, Any], unknown: Mapping[str, Any]
) -> tuple[Arguments, list[nn.Module | nn.Parameter]]:
    """The arguments of `ZeRO3`, checked, for a module that is unwrapped if its wrapper is gone; and
    what ZeRO3 modules inside ignore. Collective over the model's ranks only in that case."""
    check_module(module)
    classes = {cls.__module__ for each in given.values() for cls in type(each).__mro__}
    is_torchs = any(name.startswith("torch.distributed.fsdp") for name in classes)
    if unknown or is_torchs or callable(given["auto_wrap_policy"]):  # Which may answer in FSDP's.
        from layerzero.wrapping.fsdp_arguments import to_arguments

        given = to_arguments(given, unknown)
    arguments = check_arguments(given)
    resolve_process_groups(arguments.process_group)  # Raises if there is none.
    if not any(get_unit(part) is not None or shown_by(part) for part in module.modules()):
        return arguments, []
    from layerzero.wrapping.rewrap import unwrap_left

    arguments = unwrap_left(module, arguments)
    units = filter(None, map(get_unit, module.modules()))
    roots = {root for unit in units if (root := root_if_alive(unit)) is not None}
    return arguments, [each for root in roots for each in root.ignored.now().members]


def find_features(
    module: nn.Module,
    given: Arguments,
    units: Sequence[UnitPlan],
    everyone: tuple[int, ...],
) -> list[Extension]:
    """The features that decide on which ranks units are, if all units can be. Not collective.
    `everyone`: the ranks that share the model."""
    refuse(module, units)
    if given.memory_budget is not None:
        from layerzero.memory_budget.learner import refuse_what_it_chooses

        refuse_what_it_chooses(given)
    found: list[Extension] = [_Always()]
    groups: Mapping[int, AnyGroup] = {}
    if any(not _OF_EXPERTS.isdisjoint(unit.arguments) for unit in units):
        from layerzero.experts.units import Experts

        experts = Experts(module, units, everyone)
        found.append(experts)
        groups = experts.groups()
    is_nested = any(unit.existing is not None for unit in units)
    if is_nested or given.optional_modules or given.optional_mean != "all":
        from layerzero.optional.arguments import OptionalModules

        modules, mean = given.optional_modules, given.optional_mean
        found.append(OptionalModules(module, modules, mean, units, groups, everyone))
    return found


class _Always(Extension):
    """The part of every model; the first feature, so that its extensions come before others."""

    def new_unit(self, unit: Unit) -> None:
        module_state.install(unit)
        for module in unit.owners:
            guard(module)

    def built(self, root: RootState) -> None:
        root.structure, root.shown = Structure(root), steps.ShownStep(root)
        root.extensions.add(root.shown)
        root.extensions.add(root.structure)


def with_comparisons(plan: WrapPlan, given: Arguments) -> WrapPlan:
    """The plan with features that compare what ranks build, and the values that they start from."""
    compared: list[Extension] = [SamePlan(plan, given)]
    if not given.sync_module_states:
        compared.append(StartValues(plan.device))
    return replace(plan, extensions=Extensions([*plan.extensions.of(Extension), *compared]))


def install(root: RootState, module: nn.Module, plan: WrapPlan, topology: Topology) -> None:
    """Give a model that was just built the features of its steps."""
    given = root.arguments
    live_roots.add(root)
    if given.verify is not None:
        from layerzero.verify.verifier import Verifier

        Verifier(root, given.verify)
    parameters = module.parameters() if plan.ignored.members else ()
    root.kept_whole = [each for each in parameters if get_info(each) is None]
    if given.on_nonfinite is not None:
        from layerzero.optim.nonfinite import NonFinite

        NonFinite(root, given.on_nonfinite)
    if root.streams.is_capturing is not bool:
        from layerzero.graphs.capture import Recording

        root.extensions.add(Recording(root))
    if given.arena:
        from layerzero.graphs.arena import Arena

        root.extensions.add(Arena(root))
    root.extensions.add(AwaitedValues(root.units, root.device))
    guards.install(root)
    if not sys.modules.keys().isdisjoint(_LIBRARIES):
        from layerzero.state_dict import foreign_methods

        foreign_methods.install(module)
    if topology.placement.is_first:
        from layerzero.guards import argument_warnings

        is_shared = topology.placement.num_ranks > 1
        for text in argument_warnings.texts(module, given, plan, is_shared):
            warn_once(text, is_first=True)
        if _logger.isEnabledFor(logging.INFO):
            _log_units(module, root)
    if given.memory_budget is not None:
        from layerzero.memory_budget import Learner

        root.learner = Learner(root, given.memory_budget)
    steps.watch(_import_watchers)
    norm.make_torchs_global()
    patch_torch()


def _log_units(module: nn.Module, root: RootState) -> None:
    """Log what was sharded. Reads all units: only on the first rank, and if level INFO is on."""
    units, full = root.units, [unit.nbytes for unit in root.units]
    handles = [handle for unit in units for handle in unit.handles]
    groups = (f"{h.placement}, {h.placement.shard_group.backend}" for h in handles)
    about = dict.fromkeys([*groups, *(plain(unit.options.mixed_precision) for unit in units)])
    _logger.info(
        f"ZeRO3: {len(units)} unit{'s' * (len(units) > 1)} of {type(module).__name__} on "
        f"{root.device}: {sum(unit.num_parameters for unit in units):,} parameters, "
        f"{size_text(sum(handle.main_shard.nbytes for handle in handles))} of shards on this rank, "
        f"{size_text(sum(full))} with all units full, {size_text(max(full))} of the largest\n"
        f"  units: {some([unit.label for unit in units])}\n  {'; '.join(about)}"
    )


def _import_watchers() -> None:
    """Import what looks at optimizers of sharded parameters; their imports register them."""
    from layerzero.guards import element_wise  # noqa: F401
    from layerzero.optim import scaler  # noqa: F401
    from layerzero.state_dict import optimizer_shards  # noqa: F401
