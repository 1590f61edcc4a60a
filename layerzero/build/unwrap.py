"""Turns units back into plain modules: puts full parameters in place and removes our attributes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from layerzero.comm.exchanges import gather_along
from layerzero.comm.pending import Operation
from layerzero.flat.parameter_info import copy_attributes, set_sharded_param
from layerzero.step.handle import FlatParamHandle
from layerzero.step.methods import patched_methods, shown_by, uninstall
from layerzero.step.root import root_if_alive
from layerzero.step.unit import Unit, get_unit, unset_unit


def modules_of(module: nn.Module) -> Iterator[nn.Module]:
    """Every module inside `module`, including those inside wrappers."""
    for part in module.modules():
        yield part
        unit = get_unit(part)
        if unit is not None and unit.module is not part:
            yield unit.module


def units_inside(module: nn.Module) -> list[Unit]:
    """Units, of any model, of the modules inside `module` or of parameters they show.

    Outermost first.
    """
    found = (
        unit for part in modules_of(module) for unit in (get_unit(part), *shown_by(part).values())
    )
    return sorted(dict.fromkeys(filter(None, found)), key=lambda unit: unit.index)


def nested_ignored(module: nn.Module) -> list[nn.Module | nn.Parameter]:
    """The modules and parameters that ZeRO3 modules inside `module` ignore."""
    units = filter(None, map(get_unit, module.modules()))
    roots = {root for unit in units if (root := root_if_alive(unit)) is not None}
    return [each for root in roots for each in root.ignored.now().members]


def left_units(module: nn.Module) -> list[Unit]:
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

    Returns:
        The full parameters, keyed by the `id` of the sharded parameters they replace.

    Raises:
        RuntimeError: a method of a module was replaced since it was wrapped.
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
