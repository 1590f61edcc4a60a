"""Arguments of torch's FSDP: taken with the meaning they have there, or refused with ours named.

Nothing of `torch.distributed.fsdp` is imported: whoever passes an object of it has done so.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from torch import nn

from layerzero.config import BackwardPrefetch, MixedPrecision, OffloadPolicy
from layerzero.core.parameter_info import get_info
from layerzero.runtime.unit import get_unit

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
    "use_orig_params": "leave it out: every original parameter has one of its own, always",
    "cpu_offload": "use offload",
    "offload_policy": "use offload",
    "device_id": "use device",
    "device_mesh": "use process_group, which takes a mesh",
    "mesh": "use process_group, which takes a mesh",
    "dp_mesh_dims": 'cut the axes out of the mesh: process_group=mesh["dp"]',
    "mp_policy": "use mixed_precision",
    "ignored_states": "use ignored_modules and ignored_parameters",
    "ignored_params": "use ignored_parameters",
    "shard_placement_fn": "leave it out: parameters are split as flat elements",
}
"""What FSDP1 and `fully_shard` call what `ZeRO3` calls otherwise, or not at all."""


def refuse_unknown(unknown: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise a TypeError for the first argument that `ZeRO3` does not have.

    Args:
        known: names of those it has.
    """
    for name, value in unknown.items():
        advice = _OURS.get(name)
        if name == "sharding_strategy":
            advice = _STRATEGIES.get(getattr(value, "name", ""), advice)
        if advice is None:
            near = difflib.get_close_matches(name, known, n=1)
            advice = f"did you mean {near[0]}?" if near else f"expected one of {sorted(known)}"
        raise TypeError(f"ZeRO3 has no argument {name} (got {name}={value!r}): {advice}")


class Precision(NamedTuple):
    """A `mixed_precision` argument as ours."""

    units: MixedPrecision | None
    root: MixedPrecision | None
    """Of the wrapped module itself, which in FSDP1 casts its inputs by a choice of its own."""


def to_precision(value: Any, module: nn.Module, has_policy: bool = True) -> Precision:
    """torch's `MixedPrecision` and `MixedPrecisionPolicy` as ours; anything else as it is.

    Args:
        module: to look in for the classes that FSDP1 leaves in float32, batch norm by default.
        has_policy: whether there is an `auto_wrap_policy`, without which it leaves none.
    """
    if _is_torchs(value, "MixedPrecisionPolicy"):
        ours = MixedPrecision(
            param_dtype=value.param_dtype,
            reduce_dtype=value.reduce_dtype,
            output_dtype=value.output_dtype,
            cast_forward_inputs=value.cast_forward_inputs,
        )
        return Precision(ours, ours)
    if not _is_torchs(value, "MixedPrecision"):
        return Precision(value, value)
    if value.keep_low_precision_grads:
        raise ValueError(
            "mixed_precision: keep_low_precision_grads=True has no counterpart, gradients have "
            "the dtype of the sharded parameters; leave it out, or make the model in that dtype"
        )
    kept = tuple(value._module_classes_to_ignore) if has_policy else ()
    found = tuple(cls for cls in kept if any(isinstance(each, cls) for each in module.modules()))
    of_units, of_root = (
        MixedPrecision(
            param_dtype=value.param_dtype,
            reduce_dtype=value.reduce_dtype,
            buffer_dtype=value.buffer_dtype,
            cast_forward_inputs=casts,
            keep_float32=found,
        )
        for casts in (
            value.cast_forward_inputs,
            value.cast_forward_inputs or value.cast_root_forward_inputs,
        )
    )
    return Precision(of_units, of_root)


def to_offload(value: Any) -> Any:
    """torch's `CPUOffload`, `OffloadPolicy` and `CPUOffloadPolicy` as ours; else as it is."""
    if _is_torchs(value, "CPUOffload"):
        return OffloadPolicy(params=value.offload_params)
    if _is_torchs(value, "CPUOffloadPolicy"):
        return OffloadPolicy(params=True, pin_memory=value.pin_memory)
    return OffloadPolicy() if _is_torchs(value, "OffloadPolicy") else value


def to_backward_prefetch(value: Any) -> Any:
    """torch's `BackwardPrefetch` as ours; anything else as it is."""
    return BackwardPrefetch[value.name] if _is_torchs(value, "BackwardPrefetch") else value


def to_unit_arguments(own: Mapping[str, Any], module: nn.Module) -> dict[str, Any]:
    """Arguments that a policy gave for one unit, torch's among them as ours.

    Raises:
        ValueError: a sharding strategy that cannot be had for one unit alone.
    """
    ours = dict(own)
    if "sharding_strategy" in ours:
        strategy = getattr(ours.pop("sharding_strategy"), "name", None)
        if strategy not in ("FULL_SHARD", "SHARD_GRAD_OP"):
            raise ValueError(
                f"sharding_strategy={own['sharding_strategy']!r} for one unit: expected FULL_SHARD "
                "or SHARD_GRAD_OP; for the whole model "
                + _STRATEGIES.get(strategy or "", _OURS["sharding_strategy"])
            )
        ours.setdefault("reshard_after_forward", strategy == "FULL_SHARD")
    if "cpu_offload" in ours:
        ours.setdefault("offload", ours.pop("cpu_offload"))
    if "offload" in ours:
        ours["offload"] = to_offload(ours["offload"])
    if "mixed_precision" in ours:
        ours["mixed_precision"] = to_precision(ours["mixed_precision"], module).units
    return ours


# Policies ---------------------------------------------------------------------------------------


def run_torch_policy(
    policy: Any,
    root: nn.Module,
    ignored_modules: set[nn.Module],
    ignored_parameters: set[nn.Parameter],
) -> Mapping[int, Mapping[str, Any]] | None:
    """What a policy of `torch.distributed.fsdp.wrap` chooses; None where it is not one.

    Args:
        ignored_modules: with all modules inside them.
        ignored_parameters: those of ignored modules as well.

    Returns:
        By id of each chosen module the arguments of its own.

    Raises:
        TypeError: a function that lacks an argument, such as the classes of layers.
    """
    if isinstance(policy, type):
        return None
    if callable(getattr(policy, "_run_policy", None)):
        chosen = policy._run_policy(root, ignored_modules, {})
        return {id(module): own for module, own in chosen.items()}
    if not _takes_numel(policy):
        return None
    try:
        inspect.signature(policy).bind(module=root, recurse=True, nonwrapped_numel=0)
    except TypeError as error:
        name = getattr(policy, "__name__", policy)
        raise TypeError(
            f"auto_wrap_policy: {name} {error}: bind it, as in functools.partial("
            "transformer_auto_wrap_policy, transformer_layer_cls={Block})"
        ) from None
    return {key: {} for key in _run_function(policy, root, ignored_modules, ignored_parameters)}


def _takes_numel(policy: Any) -> bool:
    """Whether it is a function as FSDP1 calls it: (module, recurse, nonwrapped_numel)."""
    try:
        names = inspect.signature(policy).parameters
    except (TypeError, ValueError):
        return False
    return "recurse" in names or "nonwrapped_numel" in names


def _run_function(
    policy: Callable[..., bool],
    root: nn.Module,
    ignored_modules: set[nn.Module],
    ignored_parameters: set[nn.Parameter],
) -> set[int]:
    """Ask children before their parents, telling how many elements no unit below has taken."""
    chosen: set[int] = set()

    def num_taken(module: nn.Module) -> int:
        numel = sum(
            parameter.numel()
            for parameter in module.parameters()
            if parameter not in ignored_parameters and get_info(parameter) is None
        )
        if not policy(module=module, recurse=True, nonwrapped_numel=numel):
            return 0
        taken = sum(
            num_taken(child)
            for child in module.children()
            if child not in ignored_modules and get_unit(child) is None
        )
        if module is root:
            return taken
        if policy(module=module, recurse=False, nonwrapped_numel=numel - taken):
            chosen.add(id(module))
            return numel
        return taken

    num_taken(root)
    return chosen


def classes_of(policy: Any) -> tuple[type[nn.Module], ...]:
    """The module classes that a policy of ours or torch's lists, if that is what it does."""
    if isinstance(policy, type):
        return (policy,)
    listed = getattr(policy, "_module_classes", None)
    if listed is None and callable(policy):
        listed = getattr(policy, "keywords", {}).get("transformer_layer_cls", ())
    return tuple(policy if listed is None and policy is not None else listed or ())


def _is_torchs(value: object, name: str) -> bool:
    return any(
        cls.__name__ == name and cls.__module__.startswith("torch.distributed.fsdp")
        for cls in type(value).__mro__
    )
