"""Several models over one part that is wrapped, such as an actor and a critic on one trunk.

A unit has one root, which records in which order it is called and decides in backward when it is
done. So models that share a unit share a root: that of a container of them all, which is never
called, and inside which they are what wrapped parts are inside a module that a user wraps.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from layerzero.build.arguments import Arguments
from layerzero.build.wrap import UnitPlan, modules_of
from layerzero.step.root import RootState, root_if_alive
from layerzero.wrapper import ModuleWrapper

_OF_THE_ROOT = (
    *("forward_prefetch", "backward_prefetch", "limit_all_gathers", "reduction", "timeout"),
    *("on_nonfinite", "verify", "move_inputs", "memory_budget", "arena"),
    *("accumulation", "deterministic"),
)
"""Arguments of `ZeRO3` that a model has once, not each unit."""


def models_that_share(
    module: nn.Module, plans: Iterable[UnitPlan], given: Arguments
) -> list[ModuleWrapper]:
    """The living models that share units with `module` and are not inside it. Not collective.
    Raises if one cannot share its root."""
    inside = {id(part) for part in modules_of(module)}
    found: dict[int, ModuleWrapper] = {}
    for plan in plans:
        root = None if plan.existing is None else root_if_alive(plan.existing)
        wrapper: Any = None if root is None else root.wrapper_ref()
        if root is None or wrapper is None or id(root.units[0].module) in inside:
            continue
        members = wrapper.__dict__.get("_members") or (weakref.ref(wrapper),)
        for model in filter(None, (reference() for reference in members)):
            if id(model.module) not in inside and id(model) not in found:
                found[id(model)] = model
                _check(model, root, given, plan.label)
    return list(found.values())


def _check(model: ModuleWrapper, root: RootState, given: Arguments, label: str) -> None:
    what = f"ZeRO3: this model shares {label!r} with a wrapped {type(model.module).__name__}"
    theirs = root.arguments
    root.check_between_steps(f"{what}, which is in forward or backward; wrap it between steps")
    for name in _OF_THE_ROOT:
        ours, other = getattr(given, name), getattr(theirs, name)
        if ours != other:
            raise ValueError(
                f"{what}, so both need the same {name}: expected {other!r}, got {ours!r}"
            )
    if theirs.memory_budget is not None or root.extensions.reduce or root.extensions.deliver:
        raise NotImplementedError(
            f"{what}; models that share units can have no memory_budget, register_comm_hook or "
            "step_in_backward"
        )


def join(
    models: Sequence[ModuleWrapper], wrap: Callable[..., ModuleWrapper], given: Arguments
) -> None:
    """Give models that share units one root, which lives as long as any of them. Collective.

    Args:
        wrap: `ZeRO3`, which lies above this file.
        given: the arguments of one of them; the others have the same where they count.
    """
    modules = [model.module for model in models]
    named = {f"{type(each).__name__}{index}": each for index, each in enumerate(modules)}
    container = wrap(
        nn.ModuleDict(named),
        given.process_group,
        zero3_size=given.zero3_size,
        outer=given.outer,
        device=given.device,
        **{name: getattr(given, name) for name in _OF_THE_ROOT},
    )
    container.__dict__["_members"] = [weakref.ref(model) for model in models]
    for model in models:
        model.__dict__["_container"] = container
