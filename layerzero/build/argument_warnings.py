"""Warnings about arguments of `ZeRO3` that have no effect, or probably not the intended one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from layerzero.build.arguments import Arguments
from layerzero.build.plan import WrapPlan
from layerzero.build.torch_arguments import classes_of
from layerzero.build.wrap import UnitPlan, Visit
from layerzero.config import MixedPrecision
from layerzero.flat.parameter_info import get_info
from layerzero.flat.placement import Placement
from layerzero.notices import outside, warn_once
from layerzero.ops import missing_kernels


def warn(module: nn.Module, given: Arguments, plan: WrapPlan, placement: Placement) -> None:
    """Issue every warning that applies. Only the first rank warns; not collective.

    Args:
        placement: placement of the whole model.
    """
    is_first = placement.is_first
    missing = missing_kernels(plan.device)
    if missing is not None:
        warn_once(f"kernels: {plan.device.type}", missing, is_first=is_first, stacklevel=outside())
    _warn_about_policy(given.auto_wrap_policy, plan.units, plan.visits, is_first)
    precisions = [each.mixed_precision for each in plan.arguments.values()]
    _warn_about_precision(precisions, plan.visits, is_first)
    if placement.num_ranks > 1:
        _warn_about_ignored(module, given.ignored_modules, plan.ignored_parameters, is_first)


def _warn_about_policy(
    policy: Any, plans: Sequence[UnitPlan], visits: Sequence[Visit], is_first: bool
) -> None:
    """Warn about a policy that makes no unit, or lists a class that no module has.

    Args:
        is_first: whether this rank issues the warnings.
    """
    classes = () if policy is None else classes_of(policy)
    modules = _modules(visits)
    missing = [cls for cls in classes if not any(isinstance(each, cls) for each in modules)]
    if missing:
        whole = "" if len(plans) > 1 else "; the whole model is one unit, gathered at once"
        warn_once(
            f"auto_wrap_policy: {missing}",
            f"auto_wrap_policy: no module is a {_names(missing)}{whole}; "
            f"{_classes_near(missing, modules)}",
            is_first=is_first,
            stacklevel=outside(),
        )
    elif policy is not None and not classes and len(plans) == 1 and len(visits) > 1:
        warn_once(
            f"auto_wrap_policy: {policy}",
            f"auto_wrap_policy={policy!r} selected no module inside the "
            f"{type(plans[0].module).__name__}, so the whole model is one unit, gathered at once; "
            "pass None if this is intended",
            is_first=is_first,
            stacklevel=outside(),
        )


def _warn_about_precision(
    precisions: Iterable[MixedPrecision], visits: Sequence[Visit], is_first: bool
) -> None:
    """Warn about a class in `keep_float32` that no module has."""
    modules = _modules(visits)
    listed = dict.fromkeys(cls for each in precisions for cls in each.keep_float32)
    missing = [cls for cls in listed if not any(isinstance(each, cls) for each in modules)]
    if missing:
        warn_once(
            f"keep_float32: {missing}",
            f"MixedPrecision.keep_float32: no module is a {_names(missing)}; "
            f"{_classes_near(missing, modules)}",
            is_first=is_first,
            stacklevel=outside(),
        )


def _warn_about_ignored(
    root: nn.Module,
    ignored_modules: Sequence[nn.Module],
    ignored_parameters: Sequence[nn.Parameter],
    is_first: bool,
) -> None:
    """Warn about ignored parameters that are trained, and ignored objects outside the model.

    Ranks drift apart in an ignored parameter that is trained: nothing reduces its gradient.
    """
    if not ignored_modules and not ignored_parameters:
        return
    modules, parameters = set(root.modules()), set(root.parameters())
    strangers = [type(module).__name__ for module in ignored_modules if module not in modules]
    strangers += [
        f"a parameter {tuple(p.shape)}" for p in ignored_parameters if p not in parameters
    ]
    if strangers:
        warn_once(
            f"ignored: {strangers}",
            f"ignored_modules and ignored_parameters: {_names(strangers)} not in the wrapped "
            f"{type(root).__name__}, so this has no effect",
            is_first=is_first,
            stacklevel=outside(),
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
        warn_once(
            f"ignored and trained: {trained}",
            f"{len(trained)} ignored parameters require grad, such as {trained[0]!r}: ZeRO3 does "
            "not reduce their gradients, so their values diverge between ranks; freeze them, "
            "reduce their gradients over ranks before each optimizer step, or do not ignore them",
            is_first=is_first,
            stacklevel=outside(),
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
