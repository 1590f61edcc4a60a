"""Merges and checks the arguments of single units."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from layerzero.build.argument_types import (
    check_gradient_reduction,
    check_mixed_precision,
    check_reshard_after_forward,
)
from layerzero.build.torch_arguments import to_unit_arguments
from layerzero.build.wrap import UnitPlan
from layerzero.config import GradientReduction, MixedPrecision, OffloadPolicy, ReshardAfterForward
from layerzero.flat.host_memory import has_separate_memory
from layerzero.notices import outside, warn_once


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

    def of_unit(self, plan: UnitPlan, device: torch.device) -> UnitArguments:
        """The arguments of one unit: these, overridden by what `auto_wrap_policy` gave for it.

        A callable `reshard_after_forward` is called with the module and its FQN.

        Raises:
            ValueError, TypeError: an argument that cannot differ between units, or a bad value.
        """
        if plan.existing is not None:
            return self
        try:
            mine = self._overridden(to_unit_arguments(plan.arguments, plan.module), device)
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
        mixed_precision = own.get("mixed_precision", self.mixed_precision)
        check_mixed_precision(mixed_precision)
        check_gradient_reduction(own.get("gradient_reduction", "mean"))
        if not callable(own.get("reshard_after_forward")):
            check_reshard_after_forward(own.get("reshard_after_forward", True))
        _check_hook_module(own.get("hook_module"))
        changes = dict(own, mixed_precision=mixed_precision or MixedPrecision())
        if "offload" in own:
            changes["offload"] = effective_offload(own["offload"], device)
        return replace(self, **changes)


def _check_hook_module(module: object) -> None:
    if module is not None and not isinstance(module, nn.Module):
        raise TypeError(f"hook_module: expected an nn.Module or None, got {module!r}")


def effective_offload(offload: OffloadPolicy | None, device: torch.device) -> OffloadPolicy:
    """The policy, or an empty one with a warning if `device` has no memory of its own.

    Raises:
        TypeError: not an OffloadPolicy.
    """
    if offload is None:
        return OffloadPolicy()
    if not isinstance(offload, OffloadPolicy):
        raise TypeError(f"offload: expected an OffloadPolicy or None, got {offload!r}")
    if (offload.params or offload.grads) and not has_separate_memory(device):
        text = f"offload={offload} has no effect: {device} has no memory of its own"
        warn_once(text, text, stacklevel=outside())
        return OffloadPolicy()
    return offload
