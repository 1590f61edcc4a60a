"""Checks the arguments of one `ZeRO3` call and converts torch's types and names to ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from layerzero.build.argument_types import (
    check_accumulation,
    check_backward_prefetch,
    check_device,
    check_flags,
    check_gradient_reduction,
    check_group,
    check_ignored,
    check_layout,
    check_memory_budget,
    check_mixed_precision,
    check_module,
    check_on_nonfinite,
    check_param_init_fn,
    check_reshard_after_forward,
    check_timeout,
    check_verify,
)
from layerzero.build.materialize import InitFunction, Later
from layerzero.build.torch_arguments import (
    Precision,
    refuse_unknown,
    to_backward_prefetch,
    to_offload,
    to_precision,
)
from layerzero.build.wrap import WrapPolicy
from layerzero.config import (
    GatherBudget,
    OffloadPolicy,
    OnNonFinite,
    PrefetchPolicy,
    ReductionPolicy,
    ReshardAfterForward,
    Verify,
    prefetch_depth,
)
from layerzero.flat.placement import Outer

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
    precision: Precision
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


def check_arguments(
    given: Mapping[str, Any],
    unknown: Mapping[str, Any],
    find_group: Callable[[Any, int | None, str], dist.ProcessGroup] = check_group,
) -> Arguments:
    """Check and convert the arguments of `ZeRO3`. Not collective; changes nothing.

    Args:
        given: all arguments by name, `module` included.
        unknown: keyword arguments that `ZeRO3` does not have.
        find_group: what to call instead of `check_group`, to which it is equal in arguments.

    Raises:
        ValueError, TypeError: a bad or unknown argument, or a policy and one of its fields both
            given.
        RuntimeError: the module is wrapped already.
    """
    module = given["module"]
    check_module(module)
    refuse_unknown(unknown, given)
    names = ("sync_module_states", "deterministic", "move_inputs")
    check_flags(**{name: given[name] for name in names})
    check_timeout(given["timeout"])
    check_verify(given["verify"])
    check_on_nonfinite(given["on_nonfinite"])
    check_param_init_fn(given["param_init_fn"])
    check_device(given["device"])
    ignored_modules, ignored_parameters = check_ignored(
        module, given["ignored_modules"], given["ignored_parameters"]
    )
    backward_prefetch = to_backward_prefetch(given["backward_prefetch"])
    check_backward_prefetch(backward_prefetch)
    precision = to_precision(
        given["mixed_precision"], module, given["auto_wrap_policy"] is not None
    )
    check_mixed_precision(precision.units)
    check_gradient_reduction(given["gradient_reduction"])
    prefetch_depth(given["forward_prefetch"], "forward_prefetch")
    GatherBudget.parse(given["limit_all_gathers"], default_units=1)
    if not callable(given["reshard_after_forward"]):
        check_reshard_after_forward(given["reshard_after_forward"])
    group = find_group(given["process_group"], given["zero3_size"], given["outer"])
    check_accumulation(given["accumulation"])
    flat = {**given, "backward_prefetch": backward_prefetch}
    prefetch = _policy(PrefetchPolicy, "prefetch", flat, _PREFETCH)
    budget = check_memory_budget(
        given["memory_budget"], given["reshard_after_forward"], prefetch == PrefetchPolicy()
    )
    return Arguments(
        process_group=given["process_group"],
        group=group,
        zero3_size=given["zero3_size"],
        outer=given["outer"],
        auto_wrap_policy=given["auto_wrap_policy"],
        precision=precision,
        prefetch=prefetch,
        reduction=_policy(ReductionPolicy, "reduction", flat, _REDUCTION),
        reshard_after_forward=given["reshard_after_forward"],
        offload=to_offload(given["offload"]),
        ignored_modules=ignored_modules,
        ignored_parameters=ignored_parameters,
        param_init_fn=given["param_init_fn"],
        sync_module_states=given["sync_module_states"],
        device=given["device"],
        move_inputs=given["move_inputs"],
        timeout=given["timeout"],
        on_nonfinite=given["on_nonfinite"],
        optional_modules=given["optional_modules"],
        optional_mean=given["optional_mean"],
        verify=given["verify"],
        memory_budget=budget,
        row_multiple=check_layout(given["layout"]),
    )


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
