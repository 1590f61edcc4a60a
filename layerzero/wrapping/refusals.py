"""Refuses modules and parameters that cannot be sharded, on this rank, before anything changes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from layerzero.build.wrap import UnitPlan
from layerzero.flat.flatten import OriginalParameter
from layerzero.flat.groups import own_rank
from layerzero.flat.names import clean_name
from layerzero.flat.parameter_hooks import kind_of_hooks
from layerzero.flat.parameter_info import foreign_class, get_info, sharded_param_of
from layerzero.flat.tensor_parallel import local_of
from layerzero.step.root import root_if_alive
from layerzero.step.unit import get_unit
from layerzero.wrapper import ModuleWrapper

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def refuse(module: nn.Module, units: Sequence[UnitPlan]) -> None:
    """Raise ValueError if the units that a module would have, or their parameters, cannot be."""
    _refuse_uncalled(units)
    for unit in units:
        for original in unit.originals:
            problem = _problem_of(original.parameter, original)
            if problem is not None:
                raise ValueError(
                    f"{unit.label} (rank {own_rank()}): parameter {original.fqn!r} {problem}"
                )
    sharded = {id(each.parameter) for unit in units for each in unit.originals}
    # Bypass an override, which may return less.
    _refuse_shared_memory(nn.Module.named_parameters(module), sharded)


def check_module(module: nn.Module) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"ZeRO3: expected an nn.Module, got {type(module).__name__}")
    unit = get_unit(module)
    if unit is None:
        return
    root = root_if_alive(unit)
    # A module whose wrapper is gone may be wrapped again; passing a wrapper is always an error.
    if unit.module is not module or (root is not None and root.is_wrapped):
        raise RuntimeError(
            f"ZeRO3: this {type(module).__name__} is wrapped already; wrap each module once, or "
            "wrap a module that contains it"
        )


def has_forward(module: nn.Module) -> bool:
    """Whether the module itself can be called, which a ModuleList cannot."""
    return "forward" in module.__dict__ or type(module).forward is not nn.Module.forward


def _refuse_uncalled(plans: Sequence[UnitPlan]) -> None:
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


def _problem_of(parameter: nn.Parameter, original: OriginalParameter) -> str | None:
    """Why a parameter cannot be sharded; None if it can."""
    if is_lazy(parameter):
        return (
            "has no shape yet, because its module is lazy; run one forward on a batch of the right "
            "shape before wrapping"
        )
    foreign = foreign_class(parameter)
    if foreign is not None:
        return (
            f"is a {foreign.__module__}.{foreign.__qualname__}, a tensor subclass with its own "
            "operations; expected a plain nn.Parameter or a DTensor: convert it (dequantize a "
            "quantized one), or add it to ignored_parameters, which stay whole on every rank"
        )
    for slot in original.slots:
        if isinstance(slot.module, torch.jit.ScriptModule):
            return (
                "is in a scripted or traced module, where Python cannot replace it; use the Python "
                "module and compile() or, if nothing in it is trained, ignored_modules"
            )
    if parameter.layout is not torch.strided:
        return f"has layout {parameter.layout}; expected a dense parameter"
    if parameter.grad_dtype not in (None, parameter.dtype):
        return (
            f"has grad_dtype {parameter.grad_dtype}, but gradients of shards have the dtype of "
            "their parameter; build it in that dtype, and compute in a lower one with "
            "MixedPrecision(param_dtype=...)"
        )
    hooks_from = kind_of_hooks(parameter)
    if hooks_from is not None and (sharded := sharded_param_of(parameter)) is not None:
        info = get_info(sharded)
        return (
            f"is tied to {info.fqn if info else 'one'!r} of a module that was sharded without this "
            "one: shard both in one call (fully_shard of a list), or leave both to the module "
            "around them"
        )
    if hooks_from is not None:
        return (
            f"has hooks, registered with {hooks_from}: they would never run, because wrapping "
            "replaces the parameter; remove them, and register hooks on the sharded parameters of "
            "the wrapped model (docs/howto/recipes.md)"
        )
    if parameter.requires_grad and not (parameter.is_floating_point() or parameter.is_complex()):
        return (
            f"has dtype {parameter.dtype} and requires grad; expected a floating-point dtype: call "
            "requires_grad_(False) on it, or cast it"
        )
    return None


def _refuse_shared_memory(
    named: Iterable[tuple[str, nn.Parameter]], sharded: Collection[int]
) -> None:
    """Raise ValueError if the memory of two parameters overlaps, and one of them is to be sharded.

    Args:
        sharded: the ids of those that are to be.

    Each would become shards of its own. Takes n log n steps for n parameters, and reads no values.
    """
    # Of the parameters before, in memory, the one that ends last: others that overlap this one
    # overlap that one, too.
    device, reached, other, other_is_sharded = "", 0, "", False
    for place, start, stop, name, is_sharded in sorted(_memory_of(named, sharded)):
        if place == device and start < reached and (is_sharded or other_is_sharded):
            raise ValueError(
                f"parameters {other!r} and {name!r} are two Parameters over the same memory: each "
                "would get shards of its own, and a write to one would no longer change the other; "
                "make them one Parameter, which stays tied (b.weight = a.weight, without "
                "nn.Parameter or .data), or give one of them memory of its own (clone)"
            )
        if place != device or stop > reached:
            device, reached, other, other_is_sharded = place, stop, name, is_sharded


def _memory_of(
    named: Iterable[tuple[str, nn.Parameter]], sharded: Collection[int]
) -> Iterator[tuple[str, int, int, str, bool]]:
    """Device, first and last address of each parameter, its name, and whether it is sharded."""
    for name, parameter in named:
        if get_info(parameter) is not None or foreign_class(parameter) is not None:
            continue
        local = local_of(parameter)
        if local.layout is not torch.strided or not local.numel():
            continue
        if local.untyped_storage().device.type != "meta":  # That of a fake tensor is, too.
            start = local.data_ptr()
            steps = zip(local.shape, local.stride(), strict=True)
            stop = start + (sum((n - 1) * step for n, step in steps) + 1) * local.itemsize
            yield str(local.device), start, stop, clean_name(name), id(parameter) in sharded


def refuse_what_is_the_outermost_ones(modules: Iterable[nn.Module]) -> None:
    """Raise ValueError if a model inside has a feature that only the outermost one can have."""
    for inner in modules:
        unit = get_unit(inner) if isinstance(inner, ModuleWrapper) else None
        root = None if unit is None else root_if_alive(unit)
        if root is None or root.units[0] is not unit:
            continue
        if root.learner is not None or root.arguments.arena or root.extensions.reduce:
            raise ValueError(
                "memory_budget, arena, register_comm_hook: one was used on a ZeRO3 module inside, "
                "but is the whole model's; wrap all modules first, and use it on the outermost one"
            )
