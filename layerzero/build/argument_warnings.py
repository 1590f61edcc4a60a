"""Warnings about arguments of `ZeRO3` that have no effect, or probably not the intended one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from layerzero.build.arguments import Arguments
from layerzero.build.plan import WrapPlan
from layerzero.build.wrap import Visit, classes_of
from layerzero.flat.parameter_info import get_info
from layerzero.flat.placement import Placement
from layerzero.notices import warn_once
from layerzero.ops import missing_kernels


def warn(module: nn.Module, given: Arguments, plan: WrapPlan, placement: Placement) -> None:
    """Issue every warning that applies. Called on the first rank alone.

    Args:
        placement: placement of the whole model.
    """
    for text in _texts(module, given, plan, placement.num_ranks > 1):
        warn_once(text, is_first=True)


def _texts(module: nn.Module, given: Arguments, plan: WrapPlan, is_shared: bool) -> Iterator[str]:
    slow = missing_kernels(plan.device)
    if slow is not None:
        yield slow
    policy, modules = given.auto_wrap_policy, _modules(plan.visits)
    classes = () if policy is None else classes_of(policy)
    is_whole = len(plan.units) == 1
    whole = "; the whole model is one unit, gathered at once" if is_whole else ""
    precisions = {id(p): p for each in plan.arguments.values() for p in [each.mixed_precision]}
    kept = dict.fromkeys(cls for each in precisions.values() for cls in each.keep_float32)
    named = (("auto_wrap_policy", classes, whole), ("MixedPrecision.keep_float32", kept, ""))
    for argument, wanted, then in named:
        if missing := _missing(wanted, modules):
            near = _classes_near(missing, modules)
            yield f"{argument}: no module is a {_names(missing)}{then}; {near}"
    if policy is not None and not classes and is_whole and len(plan.visits) > 1:
        yield (
            f"auto_wrap_policy={policy!r} selected no module inside the "
            f"{type(plan.units[0].module).__name__}, so the whole model is one unit, gathered at "
            "once; pass None if this is intended"
        )
    if is_shared and (given.ignored_modules or plan.ignored_parameters):
        yield from _about_ignored(module, given.ignored_modules, plan.ignored_parameters)


def _missing(
    classes: Iterable[type[nn.Module]], modules: Sequence[nn.Module]
) -> list[type[nn.Module]]:
    """Classes that no module has."""
    return [cls for cls in classes if not any(isinstance(each, cls) for each in modules)]


def _about_ignored(
    root: nn.Module,
    ignored_modules: Sequence[nn.Module],
    ignored_parameters: Sequence[nn.Parameter],
) -> Iterator[str]:
    """Texts about ignored parameters that are trained, and ignored objects outside the model.

    Ranks drift apart in an ignored parameter that is trained: nothing reduces its gradient.
    """
    modules, parameters = set(root.modules()), set(root.parameters())
    strangers = [type(module).__name__ for module in ignored_modules if module not in modules]
    strangers += [
        f"a parameter {tuple(p.shape)}" for p in ignored_parameters if p not in parameters
    ]
    if strangers:
        yield (
            f"ignored_modules and ignored_parameters: {_names(strangers)} not in the wrapped "
            f"{type(root).__name__}, so this has no effect"
        )
    ignored = {p for module in ignored_modules for p in module.parameters()}
    ignored.update(ignored_parameters)
    trained = [
        name
        for name, parameter in root.named_parameters()
        if parameter in ignored
        and parameter.requires_grad
        and get_info(parameter) is None
        and not isinstance(parameter, DTensor)  # Most likely reduced by another engine.
    ]
    if trained:
        yield (
            f"{len(trained)} ignored parameters require grad, such as {trained[0]!r}: ZeRO3 does "
            "not reduce their gradients, so their values diverge between ranks; freeze them, "
            "reduce their gradients over ranks before each optimizer step, or do not ignore them"
        )


def _modules(visits: Sequence[Visit]) -> list[nn.Module]:
    """Modules that are not ignored; for a wrapped module, the one inside its wrapper as well."""
    modules = [visit.module for visit in visits]
    plans = {id(visit.plan): visit.plan for visit in visits}.values()
    return modules + [plan.existing.module for plan in plans if plan.existing is not None]


def _names(found: Sequence[Any]) -> str:
    names = [each.__name__ if isinstance(each, type) else str(each) for each in found]
    return " or ".join(names) if isinstance(found[0], type) else ", ".join(names)


def _classes_near(missing: Sequence[type], modules: Sequence[nn.Module]) -> str:
    """A clause that lists classes of the model with similar names, else its most frequent ones.

    Only classes of modules with parameters are listed.
    """
    counts: dict[type, int] = {}
    for module in modules:
        if next(module.parameters(), None) is not None:
            counts[type(module)] = counts.get(type(module), 0) + 1
    names = {cls.__name__.lower() for cls in counts}
    wanted = (cls.__name__.lower() for cls in missing)
    close = {name for each in wanted for name in difflib.get_close_matches(each, names, n=3)}
    near = [cls for cls in counts if cls.__name__.lower() in close]
    shown = near or sorted(counts, key=lambda cls: -counts[cls])[:5]
    listed = ", ".join(f"{cls.__module__}.{cls.__qualname__} ({counts[cls]})" for cls in shown)
    return f"the model has {listed}"
