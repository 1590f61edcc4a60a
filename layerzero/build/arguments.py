"""Checks the arguments of one `ZeRO3` call, and those that `auto_wrap_policy` gives for units."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from layerzero.build.materialize import InitFunction, Later
from layerzero.build.wrap import UnitPlan, WrapPolicy
from layerzero.config import (
    FLAG,
    Accumulation,
    BackwardPrefetch,
    Check,
    GatherBudget,
    GradientReduction,
    MixedPrecision,
    OffloadPolicy,
    OnNonFinite,
    OptionalMean,
    ReductionPolicy,
    ReshardAfterForward,
    Verify,
    one_of,
    parse_nbytes,
    prefetch_depth,
)
from layerzero.flat.flatten import OriginalParameter
from layerzero.flat.groups import require_timeout
from layerzero.flat.host_memory import has_separate_memory
from layerzero.flat.placement import Outer
from layerzero.notices import warn_once
from layerzero.step.unit import get_unit


def _timeout(name: str, value: Any) -> timedelta | None:
    if one_of("a datetime.timedelta or None", timedelta, None)(name, value) is not None:
        require_timeout(value)
    return value


def _init_function(name: str, value: Any) -> InitFunction | Later | None:
    if value is not None and value != "later" and not callable(value):
        expected = "expected a function of a module, 'later' or None"
        raise TypeError(f"{name}: {expected}, got {value!r}")
    return value


def _named_device(name: str, value: Any) -> torch.device | None:
    """The device that an argument names; it need not exist here."""
    kinds = torch.device, str, int, None
    named = one_of("a torch.device, 'cuda:0', an index or None", *kinds)(name, value)
    try:
        return None if named is None else torch.device(named)
    except RuntimeError as error:
        raise ValueError(f"{name}: {value!r} is not a device of torch: {error}") from None


def _several(kind: type[Any], what: str) -> Check:
    """A check that the value lists modules or parameters; it becomes a tuple."""

    def listed(name: str, values: Any) -> tuple[Any, ...]:
        if isinstance(values, (str, torch.Tensor)) or not isinstance(values, Iterable):
            raise TypeError(f"{name}: expected an iterable of {what}, got {type(values).__name__}")
        found = tuple(values)
        for value in found:
            if not isinstance(value, kind):
                raise TypeError(f"{name}: expected {what}, got {type(value).__name__}")
        return found

    return listed


def _row_multiple(name: str, layout: Any) -> int | None:
    """The number of rows of which borders between shards lie at multiples; None: at any element."""
    found = re.fullmatch(r"rows(?:\(([1-9]\d*)\))?", layout) if isinstance(layout, str) else None
    if found is None and layout != "elements":
        raise ValueError(
            f"{name}: expected 'elements', 'rows', or 'rows(32)' for borders at multiples of 32 "
            f"rows, got {layout!r}"
        )
    return None if found is None else int(found[1] or 1)


def _memory_budget(name: str, value: Any) -> int | None:
    """The budget in bytes."""
    one_of("a size such as '40GB', bytes (an int) or None", int, str, None)(name, value)
    return None if value is None else parse_nbytes(value, name)


def _resharding(name: str, value: Any) -> ReshardAfterForward:
    if isinstance(value, bool) or value == "compute_shard":
        return value
    raise ValueError(
        f"{name}: expected True, False or 'compute_shard', got {value!r} "
        "(docs/reference/migrating.md: reshard_after_forward=int)"
    )


def _gather_limit(name: str, value: Any) -> Any:
    GatherBudget.parse(value, default_units=1)
    return value


def _arena(name: str, value: Any) -> bool:
    if FLAG(name, value) and not hasattr(torch.UntypedStorage, "_swap_data_ptr_"):
        raise NotImplementedError(
            f"{name}: needs torch 2.13 or later, whose storages can exchange their memory; this is "
            f"{torch.__version__}"
        )
    return bool(value)


_CHECKS: Mapping[str, Check] = {
    "accumulation": one_of("'sharded', 'unsharded' or 'auto'", *get_args(Accumulation)),
    "arena": _arena,
    "backward_prefetch": one_of("a BackwardPrefetch or None", BackwardPrefetch, None),
    "deterministic": FLAG,
    "device": _named_device,
    "forward_prefetch": prefetch_depth,
    "gradient_reduction": one_of("'mean' or 'sum'", *get_args(GradientReduction)),
    "hook_module": one_of("an nn.Module or None", nn.Module, None),
    "ignored_modules": _several(nn.Module, "modules"),
    "ignored_parameters": _several(nn.Parameter, "parameters"),
    "layout": _row_multiple,
    "limit_all_gathers": _gather_limit,
    "memory_budget": _memory_budget,
    "mixed_precision": one_of("a MixedPrecision(param_dtype=...) or None", MixedPrecision, None),
    "move_inputs": FLAG,
    "offload": one_of("an OffloadPolicy(params=True) or None", OffloadPolicy, None),
    "on_nonfinite": one_of("'raise', 'skip' or None", *get_args(OnNonFinite), None),
    "optional_mean": one_of("'all' or 'participants'", *get_args(OptionalMean)),
    "optional_modules": _several(nn.Module, "modules"),
    "outer": one_of("'zero1', 'replicate' or 'shard'", *get_args(Outer)),
    "param_init_fn": _init_function,
    "reduction": one_of("a ReductionPolicy or None", ReductionPolicy, None),
    "reshard_after_forward": lambda n, value: value if callable(value) else _resharding(n, value),
    "sync_module_states": FLAG,
    "timeout": _timeout,
    "verify": one_of("'sampled', 'always' or None", *get_args(Verify), None),
    "zero3_size": one_of("an int or None", int, None),
}


def check(**given: Any) -> dict[str, Any]:
    """The arguments that can be checked one by one, checked and converted.

    Raises:
        TypeError, ValueError: one has another class, or a bad value.
    """
    return {name: _CHECKS[name](name, given[name]) for name in _CHECKS if name in given}


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The checked arguments of `ZeRO3`, which documents them."""

    process_group: dist.ProcessGroup | DeviceMesh | None
    zero3_size: int | None
    outer: Outer
    auto_wrap_policy: WrapPolicy
    mixed_precision: MixedPrecision | None
    root_precision: MixedPrecision | None
    """Differs from `mixed_precision` in `cast_forward_inputs` only: FSDP1 has a separate
    `cast_root_forward_inputs`."""
    forward_prefetch: int
    backward_prefetch: BackwardPrefetch | None
    limit_all_gathers: bool | int | str
    gradient_reduction: GradientReduction
    accumulation: Accumulation
    deterministic: bool
    reduction: ReductionPolicy
    reshard_after_forward: ReshardAfterForward | Callable[[nn.Module, str], ReshardAfterForward]
    offload: OffloadPolicy | None
    ignored_modules: tuple[nn.Module, ...]
    ignored_parameters: tuple[nn.Parameter, ...]
    param_init_fn: InitFunction | Later | None
    sync_module_states: bool
    device: torch.device | None
    move_inputs: bool
    timeout: timedelta | None
    on_nonfinite: OnNonFinite | None
    optional_modules: tuple[nn.Module, ...]
    optional_mean: OptionalMean
    verify: Verify | None
    memory_budget: int | None
    """Budget in bytes."""
    arena: bool
    row_multiple: int | None
    """`layout`: None for "elements", 1 for "rows"."""


@dataclass(frozen=True, kw_only=True)
class UnitArguments:
    """The arguments of `ZeRO3` that may differ between the units of one call."""

    mixed_precision: MixedPrecision
    reshard_after_forward: ReshardAfterForward | Callable[[nn.Module, str], ReshardAfterForward]
    gradient_reduction: GradientReduction
    offload: OffloadPolicy
    process_group: dist.ProcessGroup | DeviceMesh | None = None
    """The ranks that have the unit, if only some of the model's ranks do (experts)."""
    expert_numbers: dist.ProcessGroup | DeviceMesh | None = None
    """The axis that numbers experts which have the same names on every rank: experts/units.py."""
    hook_module: nn.Module | None = None
    """A module whose calls unshard and reshard the unit, besides those of the unit's own module."""

    def compute_dtype(self, original: OriginalParameter) -> torch.dtype:
        """Dtype of a parameter of the unit in forward."""
        precision, dtype = self.mixed_precision, original.parameter.dtype
        keeps = precision.keep_parameters
        if not dtype.is_floating_point or (keeps and keeps(original.fqn, original.parameter)):
            return dtype
        if any(precision.keeps_float32(slot.module) for slot in original.slots):
            return torch.float32
        return precision.param_dtype or dtype

    def of_unit(self, plan: UnitPlan, device: torch.device) -> UnitArguments:
        """The arguments of one unit: these, overridden by what `auto_wrap_policy` gave for it.

        A callable `reshard_after_forward` is called with the module and its FQN.

        Raises:
            ValueError, TypeError: an argument that cannot differ between units, or a bad value.
        """
        if plan.existing is not None:
            return self
        try:
            mine = self._overridden(plan.arguments, device) if plan.arguments else self
            reshard = mine.reshard_after_forward
            if callable(reshard):
                chosen = reshard(plan.chosen, plan.fqn)
                mine = replace(
                    mine, reshard_after_forward=_resharding("reshard_after_forward", chosen)
                )
        except (TypeError, ValueError) as error:
            raise type(error)(f"{plan.label}: {error}") from None
        return mine

    def _overridden(self, own: Mapping[str, Any], device: torch.device) -> UnitArguments:
        known = [field.name for field in fields(UnitArguments)]
        for name in own:
            if name not in known:
                raise ValueError(
                    f"auto_wrap_policy returned {name}={own[name]!r}; expected arguments that "
                    f"may differ between units, {known}: pass others to ZeRO3 itself"
                )
        changes = {**own, **check(**own)}
        if "mixed_precision" in own:
            changes["mixed_precision"] = own["mixed_precision"] or MixedPrecision()
        if "offload" in own:
            changes["offload"] = effective_offload(own["offload"], device)
        return replace(self, **changes)


def effective_offload(offload: OffloadPolicy | None, device: torch.device) -> OffloadPolicy:
    """The policy, or an empty one with a warning if `device` has no memory of its own."""
    if offload is None:
        return OffloadPolicy()
    if (offload.params or offload.grads) and not has_separate_memory(device):
        warn_once(f"offload={offload} has no effect: the model is on the CPU")
        return OffloadPolicy()
    return offload


def check_arguments(given: Mapping[str, Any]) -> Arguments:
    """Check and convert the arguments of `ZeRO3`. Not collective; changes nothing.

    Args:
        given: all arguments by name in our terms (`to_arguments` in wrapping/fsdp_arguments.py).

    Raises:
        ValueError, TypeError: a bad argument, or a policy and one of its fields both given.
    """
    ours = {**given, **check(**given)}
    for module in ours["ignored_modules"]:
        if module is given["module"] or get_unit(module) is not None:
            raise ValueError(
                f"ignored_modules: contains a {type(module).__name__} that is the wrapped module "
                "itself or sharded already; list modules inside that are to stay whole"
            )
    ours |= {"reduction": ours["reduction"] or ReductionPolicy(), "row_multiple": ours["layout"]}
    ours.setdefault("root_precision", ours["mixed_precision"])
    return Arguments(**{field.name: ours[field.name] for field in fields(Arguments)})
