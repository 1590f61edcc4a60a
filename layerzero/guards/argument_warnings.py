"""Warnings about arguments of `ZeRO3` that have no effect, or probably not the intended one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from layerzero.build.arguments import Arguments
from layerzero.build.plan import WrapPlan
from layerzero.build.wrap import classes_of
from layerzero.flat.parameter_info import get_info
from layerzero.ops import native_status
from layerzero.ops.native import has_kernel


def texts(module: nn.Module, given: Arguments, plan: WrapPlan, is_shared: bool) -> Iterator[str]:
    """Every warning that applies, for the first rank. `is_shared`: several ranks have the model."""
    if slow := missing_kernels(plan.device):
        yield slow
    # Those that are not ignored; of a wrapped module, the one inside its wrapper as well.
    existing = [unit.existing.module for unit in plan.units if unit.existing is not None]
    modules = [*(visit.module for visit in plan.visits), *existing]
    policy, is_whole = given.auto_wrap_policy, len(plan.units) == 1
    classes = () if policy is None else classes_of(policy)
    if missing := _missing(classes, modules):
        yield f"auto_wrap_policy: {missing}"
    elif policy is not None and not classes and is_whole and len(plan.visits) > 1:
        yield (
            f"auto_wrap_policy={policy!r} selected no module inside the "
            f"{type(plan.units[0].module).__name__}, so the whole model is one unit, gathered at "
            "once; pass None if this is intended"
        )
    precisions = [each.mixed_precision for each in plan.arguments.values()]
    kept = dict.fromkeys(cls for precision in precisions for cls in precision.keep_float32)
    if missing := _missing(kept, modules):
        yield f"MixedPrecision.keep_float32: {missing}"
    if is_shared:
        yield from _about_ignored(module, given.ignored_modules, given.ignored_parameters)


def missing_kernels(device: torch.device) -> str | None:
    """Why `pack_` and `ordered_sum_` run in plain torch on this device, and what to do about it.

    None if the device has kernels, or is the CPU, where installing without a compiler is a choice.
    """
    if device.type == "cpu" or has_kernel(device.type):
        return None
    is_cuda = device.type == "cuda"
    remedy = native_status().reason if is_cuda else "none exist; nothing needs to be done"
    return (
        f"no kernels of layerzero for device type {device.type!r}: {remedy}. Gradients and casts "
        "are packed in plain torch, with the same results and more kernel launches for each unit"
    )


def _missing(classes: Iterable[type], modules: Sequence[nn.Module]) -> str:
    """A text about classes that no module has; "": there are none."""
    missing = [c.__name__ for c in classes if not any(isinstance(each, c) for each in modules)]
    return f"no module of the model is a {' or '.join(missing)}" if missing else ""


def _about_ignored(
    root: nn.Module, modules: Sequence[nn.Module], parameters: Sequence[nn.Parameter]
) -> Iterator[str]:
    """A text about ignored parameters that are trained, in which ranks drift apart: nothing reduces
    their gradients."""
    ignored = {*parameters, *(p for module in modules for p in module.parameters())}
    named = root.named_parameters() if ignored else ()
    # A DTensor is most likely reduced by another engine.
    trained = [
        name
        for name, p in named
        if p in ignored and p.requires_grad and get_info(p) is None and not isinstance(p, DTensor)
    ]
    if trained:
        yield (
            f"{len(trained)} ignored parameters require grad, such as {trained[0]!r}: ZeRO3 does "
            "not reduce their gradients, so their values diverge between ranks; freeze them, "
            "reduce their gradients over ranks before each optimizer step, or do not ignore them"
        )
