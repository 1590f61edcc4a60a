"""Converts arguments of torch's FSDP to ours, or raises and names the argument to use instead.
`features.py` imports it where one comes."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from layerzero.build.wrap import Choice, ModelPolicy
from layerzero.config import BackwardPrefetch, MixedPrecision, OffloadPolicy
from layerzero.flat.names import clean_name
from layerzero.flat.parameter_info import get_info
from layerzero.step.unit import get_unit

_STRATEGIES = {
    "FULL_SHARD": "leave it out, this is the default",
    "SHARD_GRAD_OP": "use reshard_after_forward=False",
    "HYBRID_SHARD": 'use outer="replicate" with zero3_size or a mesh (outer, inner)',
    "_HYBRID_SHARD_ZERO2": 'use outer="replicate" with zero3_size or a mesh (outer, inner), and '
    "reshard_after_forward=False",
    "NO_SHARD": 'use zero3_size=1, outer="replicate"',
}
_OURS = {
    "sharding_strategy": 'use reshard_after_forward, zero3_size and outer="replicate"',
    "use_orig_params": "leave it out: every original parameter always has its own",
    "cpu_offload": "use offload",
    "offload_policy": "use offload",
    "device_id": "use device",
    "device_mesh": "use process_group, which accepts a mesh",
    "mesh": "use process_group, which accepts a mesh",
    "dp_mesh_dims": 'take the axes from the mesh: process_group=mesh["dp"]',
    "distributed_config": "use zero3_size and outer for its fsdp_size and dp_replicate_size, and "
    "ParallelManager for its tp_size",
    "mp_policy": "use mixed_precision",
    "ignored_states": "use ignored_modules and ignored_parameters",
    "ignored_params": "use ignored_parameters",
    "shard_placement_fn": "leave it out: parameters are split as flat elements",
}
"""Arguments of FSDP1 and `fully_shard` that `ZeRO3` lacks, and what to use instead."""


def to_arguments(given: Mapping[str, Any], unknown: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `ZeRO3` by name, with those that were written for FSDP in our terms. Raises
    for `unknown` ones, which `ZeRO3` does not have, and names what to use instead."""
    _refuse_unknown(unknown, given)
    policy = given["auto_wrap_policy"]
    of_units, of_root = to_precision(given["mixed_precision"], given["module"], policy is not None)
    return {
        **given,
        "auto_wrap_policy": to_policy(policy),
        "mixed_precision": of_units,
        "root_precision": of_root,
        "backward_prefetch": to_backward_prefetch(given["backward_prefetch"]),
        "offload": to_offload(given["offload"]),
    }


def _refuse_unknown(unknown: Mapping[str, Any], accepted: Collection[str]) -> None:
    for name, value in unknown.items():
        advice = _OURS.get(name)
        if name == "sharding_strategy":
            advice = _STRATEGIES.get(getattr(value, "name", ""), advice)
        if advice is None:
            near = difflib.get_close_matches(name, accepted, n=1)
            advice = f"did you mean {near[0]}?" if near else f"expected one of {sorted(accepted)}"
        raise TypeError(f"ZeRO3 has no argument {name} (got {name}={value!r}): {advice}")


def to_precision(value: Any, module: nn.Module, has_policy: bool = True) -> tuple[Any, Any]:
    """Convert torch's `MixedPrecision` and `MixedPrecisionPolicy`; return anything else unchanged:
    the precision of units, and that of the root unit, which differs in FSDP1's
    `cast_root_forward_inputs` only.

    Args:
        module: the model; classes that FSDP1 keeps in float32 (batch norm by default) are looked up
            in it.
        has_policy: whether an `auto_wrap_policy` was given; without one, FSDP1 keeps no class in
            float32.
    """
    if _is_torchs(value, "MixedPrecisionPolicy"):
        # Until torch 2.15, which has this field, None meant the dtype that gradients are computed
        # in.
        is_main = value.reduce_dtype is None and hasattr(value, "param_dtype_override_fn")
        override = getattr(value, "param_dtype_override_fn", None)
        ours = MixedPrecision(
            param_dtype=value.param_dtype,
            reduce_dtype="main" if is_main else value.reduce_dtype,
            output_dtype=value.output_dtype,
            cast_forward_inputs=value.cast_forward_inputs,
            keep_parameters=override and functools.partial(_is_kept, override, value.param_dtype),
        )
        return ours, ours
    if not _is_torchs(value, "MixedPrecision"):
        return value, value
    if value.keep_low_precision_grads:
        raise ValueError(
            "mixed_precision: keep_low_precision_grads=True has no counterpart: gradients have "
            "the dtype of the sharded parameters; leave it out, or build the model in that dtype"
        )
    kept = tuple(value._module_classes_to_ignore) if has_policy else ()
    found = tuple(cls for cls in kept if any(isinstance(each, cls) for each in module.modules()))
    ours = MixedPrecision(
        param_dtype=value.param_dtype,
        reduce_dtype=value.reduce_dtype,
        buffer_dtype=value.buffer_dtype,
        cast_forward_inputs=value.cast_forward_inputs,
        keep_float32=found,
    )
    casts = value.cast_forward_inputs or value.cast_root_forward_inputs
    return ours, replace(ours, cast_forward_inputs=casts)


def _is_kept(
    override: Callable[[nn.Parameter], torch.dtype | None],
    param_dtype: torch.dtype | None,
    name: str,
    parameter: nn.Parameter,
) -> bool:
    chosen = override(parameter)
    if chosen not in (None, param_dtype, parameter.dtype):
        raise ValueError(
            f"mixed_precision: param_dtype_override_fn returned {chosen!r} for {name!r}; expected "
            f"None, {param_dtype} or {parameter.dtype}"
        )
    return chosen == parameter.dtype


def to_offload(value: Any) -> Any:
    """Convert torch's `CPUOffload`, `OffloadPolicy` and `CPUOffloadPolicy`; return others as is."""
    if _is_torchs(value, "CPUOffload"):
        return OffloadPolicy(params=value.offload_params)
    if _is_torchs(value, "CPUOffloadPolicy"):
        return OffloadPolicy(params=True, pin_memory=value.pin_memory)
    return OffloadPolicy() if _is_torchs(value, "OffloadPolicy") else value


def to_backward_prefetch(value: Any) -> Any:
    """Convert torch's `BackwardPrefetch`; return anything else unchanged."""
    return BackwardPrefetch[value.name] if _is_torchs(value, "BackwardPrefetch") else value


def to_policy(policy: Any) -> Any:
    """A policy in our terms, which gives units arguments in our terms; None if it is None."""
    chooses = callable(policy) or hasattr(policy, "_run_policy")
    if isinstance(policy, (type, nn.Module)) or not chooses:
        return policy
    try:
        names = inspect.signature(policy).parameters if callable(policy) else ()
    except (TypeError, ValueError):
        names = ()
    if hasattr(policy, "_run_policy") or "recurse" in names or "nonwrapped_numel" in names:
        keywords = getattr(policy, "keywords", {})
        listed = getattr(policy, "_module_classes", None) or keywords.get("transformer_layer_cls")
        return ModelPolicy(functools.partial(_choices, policy), tuple(listed or ()))

    @functools.wraps(policy)
    def choose(module: nn.Module, fqn: str) -> Choice:
        return _in_our_terms(policy(module, fqn), module, fqn)

    return choose


def _in_our_terms(own: Choice, module: nn.Module, fqn: str) -> Choice:
    """Convert the answer of a policy for one module.

    Raises:
        ValueError: a sharding strategy that a single unit cannot have.
    """
    if not isinstance(own, Mapping):
        return own
    ours = dict(own)
    if "sharding_strategy" in ours:
        strategy = getattr(ours.pop("sharding_strategy"), "name", None)
        if strategy not in ("FULL_SHARD", "SHARD_GRAD_OP"):
            raise ValueError(
                f"{fqn}: sharding_strategy={own['sharding_strategy']!r} for one unit: expected "
                "FULL_SHARD or SHARD_GRAD_OP; for the whole model "
                + _STRATEGIES.get(strategy or "", _OURS["sharding_strategy"])
            )
        ours.setdefault("reshard_after_forward", strategy == "FULL_SHARD")
    if "cpu_offload" in ours:
        ours.setdefault("offload", ours.pop("cpu_offload"))
    if "offload" in ours:
        ours["offload"] = to_offload(ours["offload"])
    if "mixed_precision" in ours:
        ours["mixed_precision"] = to_precision(ours["mixed_precision"], module)[0]
    return ours


def _choices(
    policy: Any,
    root: nn.Module,
    ignored_modules: Iterable[nn.Module],
    ignored_parameters: Iterable[nn.Parameter],
) -> Mapping[int, Choice]:
    """Choices in FSDP1 of a policy of `torch.distributed.fsdp.wrap`, or of a function with the
    arguments of one; see `ModelPolicy`."""
    ignored = {module for top in ignored_modules for module in top.modules()}
    if callable(getattr(policy, "_run_policy", None)):
        chosen = policy._run_policy(root, ignored, {})
        names = {module: clean_name(name) for name, module in root.named_modules()}
        return {id(m): _in_our_terms(own, m, names[m]) for m, own in chosen.items()}
    # The walk of FSDP1 itself, which wraps nothing here.
    from torch.distributed.fsdp.wrap import _recursive_wrap

    found: dict[int, Choice] = {}

    def note(module: nn.Module, **_: Any) -> nn.Module:
        found[id(module)] = {}
        return module

    parameters = {parameter for module in ignored for parameter in module.parameters()}
    parameters.update(ignored_parameters)
    parameters.update(each for each in root.parameters() if get_info(each) is not None)
    ignored |= {part for part in root.modules() if part is not root and get_unit(part) is not None}
    _recursive_wrap(root, policy, note, ignored, parameters, only_wrap_children=True)
    return found


def _is_torchs(value: object, name: str) -> bool:
    return any(
        cls.__name__ == name and cls.__module__.startswith("torch.distributed.fsdp")
        for cls in type(value).__mro__
    )
