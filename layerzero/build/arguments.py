"""Checks the arguments of one `ZeRO3` call, and those that `auto_wrap_policy` gives for units."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from layerzero.build.argument_types import (
    check,
    check_device,
    check_ignored,
    check_layout,
    check_memory_budget,
    check_module,
    check_param_init_fn,
    check_reshard_after_forward,
    check_timeout,
)
from layerzero.build.materialize import InitFunction, Later
from layerzero.build.wrap import UnitPlan, WrapPolicy
from layerzero.config import (
    GatherBudget,
    GradientReduction,
    MixedPrecision,
    OffloadPolicy,
    OnNonFinite,
    PrefetchPolicy,
    ReductionPolicy,
    ReshardAfterForward,
    Verify,
    is_of_fsdp,
    prefetch_depth,
)
from layerzero.flat.flat_param import OriginalParameter
from layerzero.flat.groups import resolve_process_groups
from layerzero.flat.host_memory import has_separate_memory
from layerzero.flat.placement import Outer
from layerzero.notices import outside, warn_once

_PREFETCH = {
    "forward": "forward_prefetch",
    "backward": "backward_prefetch",
    "limit": "limit_all_gathers",
}
_REDUCTION = {
    "reduce": "gradient_reduction",
    "accumulation": "accumulation",
    "deterministic": "deterministic",
}
"""Each field of the policy, and the `ZeRO3` argument with the same meaning."""

_OF_FSDP = ("mixed_precision", "backward_prefetch", "offload")
"""Arguments that may be objects of `torch.distributed.fsdp`."""
_BY_TABLE = (
    *("accumulation", "backward_prefetch", "deterministic", "gradient_reduction"),
    *("mixed_precision", "move_inputs", "offload", "on_nonfinite", "outer"),
    *("sync_module_states", "verify", "zero3_size"),
)

_Policy = TypeVar("_Policy", PrefetchPolicy, ReductionPolicy)


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The checked arguments of `ZeRO3`, which documents them."""

    process_group: dist.ProcessGroup | DeviceMesh | None
    group: dist.ProcessGroup
    """The first group of `process_group`; its backends stand for all of them."""
    zero3_size: int | None
    outer: Outer
    auto_wrap_policy: WrapPolicy
    mixed_precision: MixedPrecision | None
    root_precision: MixedPrecision | None
    """Differs from `mixed_precision` in `cast_forward_inputs` only: FSDP1 has a separate
    `cast_root_forward_inputs`."""
    prefetch: PrefetchPolicy
    reduction: ReductionPolicy
    reshard_after_forward: ReshardAfterForward | Callable[[nn.Module, str], ReshardAfterForward]
    offload: OffloadPolicy | None
    ignored_modules: tuple[nn.Module, ...]
    ignored_parameters: tuple[nn.Parameter, ...]
    param_init_fn: InitFunction | Later | None
    sync_module_states: bool
    device: torch.device | str | int | None
    move_inputs: bool
    timeout: timedelta | None
    on_nonfinite: OnNonFinite | None
    optional_modules: object
    """Checked by `find_optional` in optional.py, as is `optional_mean`."""
    optional_mean: object
    verify: Verify | None
    memory_budget: int | None
    """Budget in bytes."""
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
    expert_numbers: Mapping[int, int] | dist.ProcessGroup | DeviceMesh | None = None
    """Global numbers of experts that have the same names on every rank; see expert_numbers.py."""
    hook_module: nn.Module | None = None
    """A module whose calls unshard and reshard the unit, besides those of the unit's own module."""

    def compute_dtype(self, original: OriginalParameter) -> torch.dtype:
        """Dtype of a parameter of the unit in forward."""
        precision = self.mixed_precision
        keeps = bool(precision.keep_float32) and any(
            precision.keeps_float32(slot.module) for slot in original.slots
        )
        return precision.compute_dtype(original.fqn, original.parameter.dtype, keeps)

    def of_unit(self, plan: UnitPlan, device: torch.device) -> UnitArguments:
        """The arguments of one unit: these, overridden by what `auto_wrap_policy` gave for it.

        A callable `reshard_after_forward` is called with the module and its FQN.

        Raises:
            ValueError, TypeError: an argument that cannot differ between units, or a bad value.
        """
        if plan.existing is not None:
            return self
        try:
            mine = self
            if plan.arguments:
                mine = self._overridden(_in_our_terms(plan.arguments, plan.module), device)
            reshard = mine.reshard_after_forward
            if callable(reshard):
                chosen = reshard(plan.chosen, plan.fqn)
                mine = replace(mine, reshard_after_forward=check_reshard_after_forward(chosen))
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
        names = ("mixed_precision", "gradient_reduction", "offload", "hook_module")
        check(**{name: own[name] for name in names if name in own})
        if not callable(own.get("reshard_after_forward")):
            check_reshard_after_forward(own.get("reshard_after_forward", True))
        changes = dict(own)
        if "mixed_precision" in own:
            changes["mixed_precision"] = own["mixed_precision"] or MixedPrecision()
        if "offload" in own:
            changes["offload"] = effective_offload(own["offload"], device)
        return replace(self, **changes)


def _in_our_terms(own: Mapping[str, Any], module: nn.Module) -> Mapping[str, Any]:
    """The arguments of one unit, of which some may be FSDP's."""
    if {"sharding_strategy", "cpu_offload"}.isdisjoint(own) and not any(
        is_of_fsdp(own.get(name)) for name in _OF_FSDP
    ):
        return own
    from layerzero.build.migrate import to_unit_arguments

    return to_unit_arguments(own, module)


def effective_offload(offload: OffloadPolicy | None, device: torch.device) -> OffloadPolicy:
    """The policy, or an empty one with a warning if `device` has no memory of its own."""
    if offload is None:
        return OffloadPolicy()
    if (offload.params or offload.grads) and not has_separate_memory(device):
        text = f"offload={offload} has no effect: {device} has no memory of its own"
        warn_once(text, text, stacklevel=outside())
        return OffloadPolicy()
    return offload


def _first_group(process_group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup:
    """The group whose backends help to choose the device. Not collective."""
    return resolve_process_groups(process_group)[0]


def check_arguments(
    given: Mapping[str, Any],
    unknown: Mapping[str, Any],
    find_group: Callable[[Any], dist.ProcessGroup] = _first_group,
) -> Arguments:
    """Check and convert the arguments of `ZeRO3`. Not collective; changes nothing.

    Args:
        given: all arguments by name, `module` included.
        unknown: keyword arguments that `ZeRO3` does not have.
        find_group: what to call instead of `_first_group`.

    Raises:
        ValueError, TypeError: a bad or unknown argument, or a policy and one of its fields both
            given.
        RuntimeError: the module is wrapped already.
    """
    module = given["module"]
    check_module(module)
    if unknown:
        from layerzero.build.migrate import refuse_unknown

        refuse_unknown(unknown, given)
    ours: dict[str, Any] = {**given, "root_precision": given["mixed_precision"]}
    if any(is_of_fsdp(given[name]) for name in _OF_FSDP):
        from layerzero.build.migrate import to_arguments

        ours.update(to_arguments(given))
    check(**{name: ours[name] for name in _BY_TABLE})
    check_timeout(given["timeout"])
    check_param_init_fn(given["param_init_fn"])
    check_device(given["device"])
    ours["ignored_modules"], ours["ignored_parameters"] = check_ignored(
        module, given["ignored_modules"], given["ignored_parameters"]
    )
    prefetch_depth(given["forward_prefetch"], "forward_prefetch")
    GatherBudget.parse(given["limit_all_gathers"], default_units=1)
    if not callable(given["reshard_after_forward"]):
        check_reshard_after_forward(given["reshard_after_forward"])
    ours["group"] = find_group(given["process_group"])
    ours["prefetch"] = _policy(PrefetchPolicy, "prefetch", ours, _PREFETCH)
    ours["reduction"] = _policy(ReductionPolicy, "reduction", ours, _REDUCTION)
    ours["row_multiple"] = check_layout(given["layout"])
    ours["memory_budget"] = check_memory_budget(
        given["memory_budget"],
        given["reshard_after_forward"],
        ours["prefetch"] == PrefetchPolicy(),
    )
    return Arguments(**{field.name: ours[field.name] for field in fields(Arguments)})


def _policy(
    kind: type[_Policy], name: str, given: Mapping[str, Any], flat: Mapping[str, str]
) -> _Policy:
    """The policy that was given, or one made of the single arguments with the same meaning."""
    values = {field: given[argument] for field, argument in flat.items()}
    policy = given[name]
    if policy is None:
        return kind(**values)
    if not isinstance(policy, kind):
        raise TypeError(f"{name}: expected a {kind.__name__} or None, got {policy!r}")
    for field, argument in flat.items():
        # An argument that was not given has its default, which is the policy's default as well.
        if values[field] != getattr(kind(), field):
            raise ValueError(
                f"{name}={policy!r} and {argument}={values[field]!r} are both given; pass only "
                f"one: {name}={kind.__name__}({field}={values[field]!r}, ...)"
            )
    return policy
