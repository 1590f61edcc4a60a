"""rewrap: shards a model again after its modules or parameters were changed.

Units become plain modules first. So do those that a wrapper left which is gone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from layerzero.build.arguments import Arguments
from layerzero.build.wrap import modules_of, units_inside
from layerzero.comm.exchanges import gather_along
from layerzero.comm.pending import Operation
from layerzero.flat.parameter_hooks import kind_of_hooks
from layerzero.flat.parameter_info import copy_attributes, get_info, info_of, set_sharded_param
from layerzero.notices import warn_once
from layerzero.optional.arguments import optional_now
from layerzero.state_dict.summon import check_idle
from layerzero.step.handle import FlatParamHandle
from layerzero.step.methods import patched_methods, uninstall
from layerzero.step.root import root_if_alive, root_of
from layerzero.step.unit import Unit, get_unit, unset_unit
from layerzero.wrapper import ModuleWrapper


def rewrap(model: ModuleWrapper) -> list[str]:
    """Shard a model again whose modules or parameters were changed after wrapping. Collective.

    The arguments of the first wrapping apply, and the wrapper object stays the same. A parameter
    keeps its sharded parameter (the same object, with `.grad`, hooks and optimizer state) if its
    unit is laid out as before; a warning names the other parameters that had hooks. Prefetch lists
    and recorded execution orders are reset.

    Every rank gathers the whole model once, so the unsharded model must fit in its memory. New
    parameters must have equal values on all ranks.

    Args:
        model: the outermost ZeRO3 module, between steps.

    Returns:
        Names of the parameters whose sharded parameters are new. No optimizer has these yet; an
        optimizer that held the former ones must be created again.

    Raises:
        ValueError: `model` is not the outermost ZeRO3 module, or shares units with another model.
        RuntimeError: it is in forward or backward, gradients wait for a backward that synchronizes,
            methods of modules were replaced after wrapping, or modules were changed inside
            `summon_full_params(writeback=False)`.
        NotImplementedError: a module inside is wrapped by its own ZeRO3, or `step_in_backward` is
            on.
    """
    unit = get_unit(model)
    if not isinstance(model, ModuleWrapper) or unit is None or root_of(unit).units[0] is not unit:
        raise ValueError(f"rewrap: expected the outermost ZeRO3 module, got {type(model).__name__}")
    root = root_of(unit)
    root.backward.clear_abandoned()
    root.before_call("rewrap")
    if root.structure.was_dropped:  # By a merge of adapters, for example.
        raise RuntimeError(
            "rewrap: modules were changed inside summon_full_params(writeback=False), which "
            "dropped the values of parameters there; use writeback=True, or load what was saved "
            "into a new model"
        )
    check_idle(root, root.units, "rewrap")
    if any(handle.gradients.is_waiting for each in root.units for handle in each.handles):
        raise RuntimeError(
            "rewrap: expected a model between steps, but it has unreduced gradients; call "
            "reduce_gradients() first"
        )
    for name, module in model.named_modules():
        if module is not model and isinstance(module, ModuleWrapper):
            raise NotImplementedError(
                f"rewrap: {name!r} was wrapped by its own ZeRO3, whose arguments would be lost; "
                "build the model again and wrap it with auto_wrap_policy"
            )
    if root.extensions.deliver:
        raise NotImplementedError(
            "rewrap: would replace sharded parameters of the optimizer that steps in backward; "
            "call step_in_backward(None) before, and step_in_backward(a new optimizer) afterwards"
        )
    before = dict.fromkeys(parameter for each in root.units for parameter in each.sharded_params)
    ignored = root.ignored.now()
    given: dict[str, object] = dict(model.__dict__["_given"])
    given.update(
        ignored_modules=ignored.modules,
        ignored_parameters=ignored.parameters,
        optional_modules=optional_now(unit),
    )
    patches = model.forward_patches
    if patches:
        del model.forward
    unwrap(model, root.units)
    del unit, root
    wrapper: Any = model
    wrapper._shard(model.module, given, {})
    for patch in patches:
        model._patch_forward(patch)
    shown = set(model.parameters())
    lost = [info_of(p).fqn for p in before if kind_of_hooks(p) is not None and p not in shown]
    if lost:
        warn_once(
            f"rewrap: the hooks on {lost} were lost, because their sharded parameters were "
            "replaced; register them again"
        )
    return [
        name
        for name, parameter in model.named_parameters()
        if get_info(parameter) is not None and parameter not in before
    ]


def unwrap_left(module: nn.Module, given: Arguments) -> Arguments:
    """Unwrap a module whose wrapper is gone, so that it can be wrapped again. Returns the arguments
    with full parameters in place of the sharded ones. Collective, if there is such a wrapper."""
    left = _left_units(module)
    if not left:
        return given
    full = unwrap(module, left)
    ignored = tuple(full.get(id(each), each) for each in given.ignored_parameters)
    return replace(given, ignored_parameters=ignored)


def _left_units(module: nn.Module) -> list[Unit]:
    """Units inside `module` whose wrapper is gone, so that they may be wrapped again.

    Excludes nested units, which join the model wrapped around them: those of a wrapper inside
    `module`, and those of a module inside it that was wrapped without keeping the wrapper. And
    those that `module` shares with another wrapped model; see shared_parts.py.

    Raises:
        RuntimeError: `module` is inside a wrapped model, or has a part of one that is no unit.
    """
    inside = {id(part) for part in modules_of(module)}
    wrapped = [p for p in module.modules() if (u := get_unit(p)) is not None and u.module is not p]
    nested = {unit for part in wrapped for unit in units_inside(part)}
    left = []
    for unit in units_inside(module):
        root = root_if_alive(unit)
        if root is not None:
            outermost = root.units[0].module
            if outermost is not module and id(outermost) in inside:
                continue
            if root.is_wrapped and not (unit in nested and outermost is module):
                is_in_place = root.wrapper_ref() is outermost
                is_part = any(part is module for part in modules_of(outermost))
                if not (is_in_place or is_part) and id(unit.module) in inside:
                    continue
                raise RuntimeError(
                    f"ZeRO3: this {type(module).__name__} contains parameters of {unit.label!r} of "
                    f"a wrapped {type(outermost).__name__}. Wrap modules inside before those "
                    "around them. Two models can share whole units only: wrap what they share "
                    "first, or both in one module"
                )
        if unit not in nested:
            left.append(unit)
    return left


def unwrap(module: nn.Module, units: Sequence[Unit]) -> dict[int, nn.Parameter]:
    """Gather the parameters of `units` and leave plain modules. Collective over their groups.

    Every rank then holds all of these parameters at once. They are also put in place in modules
    inside `module` that show a sharded parameter and are in no unit: those put there later.
    Returns them, keyed by the `id` of the sharded parameters they replace.
    """
    owners = {id(owner): owner for unit in units for owner in unit.owners}
    for owner in owners.values():
        if patched := patched_methods(owner):
            raise RuntimeError(
                f"{type(owner).__name__}: {patched} were replaced after wrapping, and call what "
                "ZeRO3 installed there; undo that before wrapping the module again"
            )
    full: dict[int, nn.Parameter] = {}
    for unit in units:
        if root_if_alive(unit) is not None:
            unit.reshard()
            unit.drop_unsharded_gradients()
            for handle in unit.handles:
                handle.gradients.forget()
        unit.show_sharded()
        for number, handle in enumerate(unit.handles):
            handle.reset_sharded_params(unit.label)
            full.update(_gathered(unit, handle, number))
        for hook in unit.state_dict_hooks:
            hook.remove()
    for part in (*owners.values(), *modules_of(module)):
        for name, shown in part._parameters.items():
            if id(shown) in full:
                part._parameters[name] = full[id(shown)]
    for owner in owners.values():
        uninstall(owner)
        unset_unit(owner)
    return full


@torch.no_grad()
def _gathered(unit: Unit, handle: FlatParamHandle, number: int) -> dict[int, nn.Parameter]:
    full = {}
    own, name = handle.main_shard.to(handle.full.device), Operation("unwrap", unit.label, number)
    flat = gather_along(own, handle.placement.owner_groups, lambda _: name).view(-1)
    for index, sharded in enumerate(handle.sharded_params):
        value = handle.view_of(flat, index).clone()
        full[id(sharded)] = parameter = nn.Parameter(value, requires_grad=sharded.requires_grad)
        copy_attributes(sharded, parameter)
        set_sharded_param(parameter, sharded)
    return full
