"""Converts option values of a plan, such as strings from a file, to arguments of `ZeRO3`.

Options come in three levels: the plan's fields, its `defaults`, and a module's own. A level's
`mixed_precision` replaces that of the level above; `param_dtype` and the like override one field.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from layerzero.build.arguments import check
from layerzero.config import FLAG, BackwardPrefetch, MixedPrecision, OffloadPolicy
from layerzero.flat.groups import LONGEST_TIMEOUT
from layerzero.migrate import to_offload, to_precision
from layerzero.plan.activations import read_act_ckpt
from layerzero.zero3 import KEYWORDS

DTYPE_OPTIONS = ("param_dtype", "reduce_dtype", "buffer_dtype", "output_dtype")
PRECISION_OPTIONS = (*DTYPE_OPTIONS, "cast_forward_inputs")
ZERO3_OPTIONS = tuple(name for name in KEYWORDS if name != "reduction")
"""Without `reduction`, which a file cannot express."""
MODULE_OPTIONS = (
    *PRECISION_OPTIONS,
    "mixed_precision",
    "reshard_after_forward",
    "gradient_reduction",
    "offload",
    "cpu_offload",
    "act_ckpt",
)
"""Options that may differ between the modules of one model."""
_TORCHS = {
    "mp_policy": "mixed_precision",
    "offload_policy": "offload",
    "cpu_offload_policy": "cpu_offload",
}
"""Options of `fully_shard`, and of finetuning-scheduler's plans, that have another name here;
torch's policies are accepted as values."""
_SET_ELSEWHERE = {
    "process_group": "pass the mesh to shard_with_plan",
    "mesh": "pass the mesh to shard_with_plan",
    "device_mesh": "pass the mesh to shard_with_plan",
    "shard_placement_fn": "leave it out: parameters are split as flat elements",
    "ignored_params": "use the plan's ignored_parameters",
    "ignored_states": "use the plan's ignored_modules and ignored_parameters",
    "sharding_strategy": "use reshard_after_forward, and zero3_size and outer in defaults",
    "auto_wrap_policy": "apply_modules is the policy",
    "ignored_modules": "it is a field of the plan",
    "ignored_parameters": "it is a field of the plan",
    "optional_modules": "use the plan's optional",
    "optional": "it is a field of the plan",
    "hook_module": "use the plan's hook_modules",
    "hook_modules": "it is a field of the plan",
}
_DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}


def near_matches(name: str, known: Iterable[str]) -> str:
    """A clause for an error message that lists similar names; empty if there are none."""
    found = difflib.get_close_matches(name, list(dict.fromkeys(known)), n=3, cutoff=0.5)
    return f"; near matches: {', '.join(map(repr, found))}" if found else ""


def read_options(
    where: str, options: Mapping[str, Any], known: Sequence[str], why_not: str = ""
) -> dict[str, Any]:
    """Convert and check the options of one level.

    Args:
        where: name of the level in error messages.
        known: options that the level may have.
        why_not: the reason to give for a `ZeRO3` argument that the level may not have.

    Raises:
        ValueError, TypeError: an unknown option, one that belongs elsewhere, one given twice, or a
            bad value.
    """
    if not isinstance(options, Mapping):
        raise TypeError(f"{where}: expected a mapping of options, got {options!r}")
    read: dict[str, Any] = {}
    for given, value in options.items():
        name = _TORCHS.get(given, given)
        if name != given and name in options:
            raise ValueError(f"{where}: {given} and {name} are both given; set only one of them")
        if name in _SET_ELSEWHERE:
            raise ValueError(
                f"{where}: {name}={value!r} cannot be an option: {_SET_ELSEWHERE[name]}"
            )
        if name not in known:
            reason = f"; {why_not}" if name in ZERO3_OPTIONS else near_matches(str(name), known)
            raise ValueError(
                f"{where}: unknown option {name!r} (value {value!r}){reason}; expected one of "
                f"{sorted(known)}"
            )
        try:
            read[name] = _READERS[name](value) if name in _READERS else value
        except (TypeError, ValueError) as error:
            raise type(error)(f"{where}: {error}") from None
    refuse_twice(where, GIVEN_TWICE, read, read)
    return read


def read_dtype(name: str, value: Any) -> torch.dtype | None:
    """A floating-point dtype, or its name: 'bfloat16', 'bf16' or 'torch.bfloat16'."""
    if value is None:
        return None
    dtype = value
    if isinstance(value, str):
        short = value.removeprefix("torch.")
        dtype = _DTYPES.get(short) or getattr(torch, short, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(
            f"{name}: expected a floating-point dtype or its name, such as 'bfloat16' or 'bf16', "
            f"got {value!r}"
        )
    return dtype


def _read_mixed_precision(value: Any) -> MixedPrecision:
    if hasattr(value, "cast_root_forward_inputs"):
        raise TypeError(
            "mixed_precision: FSDP1's MixedPrecision has special rules for the root and batch "
            "norms, which a plan expresses by names; use layerzero.MixedPrecision, or FSDP2's "
            f"MixedPrecisionPolicy; got {value!r}"
        )
    value = to_precision(value, nn.Module()).units
    if value is None or isinstance(value, MixedPrecision):
        return value or MixedPrecision()
    given = dict(_arguments("mixed_precision", value, MixedPrecision))
    for name in given.keys() & set(DTYPE_OPTIONS):
        given[name] = read_dtype(f"mixed_precision.{name}", given[name])
    return MixedPrecision(**given)


def _read_cpu_offload(value: Any) -> OffloadPolicy:
    """True and a mapping offload parameters, and with them gradients and optimizer state."""
    if isinstance(value, bool) or value is None:
        return OffloadPolicy(params=bool(value))
    return _read_policy("cpu_offload", value, params=True)


def _read_policy(name: str, value: Any, **defaults: bool) -> OffloadPolicy:
    value = to_offload(value)
    if value is None or isinstance(value, OffloadPolicy):
        return value or OffloadPolicy()
    given = _arguments(name, value, OffloadPolicy)
    for argument, setting in given.items():
        FLAG(f"{name}.{argument}", setting)
    return OffloadPolicy(**{**defaults, **given})


def _arguments(name: str, value: Any, cls: Any) -> Mapping[str, Any]:
    """`value` as a mapping of arguments of `cls`.

    Raises:
        TypeError, ValueError: it is no mapping, or has an unknown argument.
    """
    if not isinstance(value, Mapping):
        raise TypeError(
            f"{name}: expected a {cls.__name__} or a mapping of its arguments, got {value!r}"
        )
    known = [each.name for each in fields(cls)]
    for argument in value:
        if argument not in known:
            raise ValueError(
                f"{name}: unknown argument {argument!r}{near_matches(str(argument), known)}; "
                f"expected {known}"
            )
    return value


def _read_backward_prefetch(value: Any) -> BackwardPrefetch | None:
    if not isinstance(value, str):
        check(backward_prefetch=value)
        return value
    try:
        return BackwardPrefetch(value.lower())
    except ValueError:
        known = [each.value for each in BackwardPrefetch]
        raise ValueError(f"backward_prefetch: expected one of {known}, got {value!r}") from None


def _read_timeout(value: Any) -> timedelta | None:
    if value is None or isinstance(value, timedelta):
        return value
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 < value <= LONGEST_TIMEOUT.total_seconds():
        expected = "seconds > 0 and of at most 100 years, a timedelta or None"
        raise ValueError(f"timeout: expected {expected}, got {value!r}")
    return timedelta(seconds=value)


def _checked(name: str, value: Any) -> Any:
    check(**{name: value})
    return value


_CHECKED = (
    *("accumulation", "gradient_reduction", "on_nonfinite", "optional_mean", "outer", "verify"),
    *("zero3_size", "forward_prefetch", "limit_all_gathers", "memory_budget"),
    *("deterministic", "reshard_after_forward", "sync_module_states", "arena"),
)
_READERS: dict[str, Callable[[Any], Any]] = {
    **{name: partial(read_dtype, name) for name in DTYPE_OPTIONS},
    "cast_forward_inputs": partial(FLAG, "cast_forward_inputs"),
    **{name: partial(_checked, name) for name in _CHECKED},
    "mixed_precision": _read_mixed_precision,
    "cpu_offload": _read_cpu_offload,
    "offload": partial(_read_policy, "offload"),
    "act_ckpt": read_act_ckpt,
    "backward_prefetch": _read_backward_prefetch,
    "timeout": _read_timeout,
}
"""Functions that convert a value, or raise for a bad one."""
GIVEN_TWICE = [("mixed_precision", name) for name in PRECISION_OPTIONS]
GIVEN_TWICE.append(("offload", "cpu_offload"))
"""Options that say the same."""


def refuse_twice(
    where: str,
    pairs: Iterable[tuple[str, str]],
    first: Mapping[str, Any],
    second: Mapping[str, Any],
    of_second: str = "",
) -> None:
    """Raise ValueError if of a pair one is in `first` and the other in `second`."""
    for one, other in pairs:
        if one in first and other in second:
            raise ValueError(
                f"{where}: {one}={first[one]!r} and{of_second} {other}={second[other]!r} are both "
                "given; set only one of them"
            )


def engine_arguments(
    options: Mapping[str, Any], base: MixedPrecision | None = None
) -> dict[str, Any]:
    """The options of one level as arguments of `ZeRO3`; those that it does not have are left out.

    Args:
        base: mixed precision of the level above, which those of this level change.
    """
    arguments = {name: value for name, value in options.items() if name in ZERO3_OPTIONS}
    if any(name in options for name in ("mixed_precision", *PRECISION_OPTIONS)):
        arguments["mixed_precision"] = merge_precision(base or MixedPrecision(), options)
    if options.get("cpu_offload") is not None:
        arguments["offload"] = options["cpu_offload"]
    return arguments


def merge_precision(base: MixedPrecision, options: Mapping[str, Any]) -> MixedPrecision:
    """`base` with one level of options applied to it."""
    base = options.get("mixed_precision", base)
    return replace(base, **{name: options[name] for name in PRECISION_OPTIONS if name in options})


def load_yaml(path: Path) -> Any:
    """The content of a YAML file as plain data; no other objects are constructed.

    Raises:
        ImportError: PyYAML is not installed.
        ValueError: not YAML, or a duplicate key (PyYAML would silently take the last one).
    """
    try:
        yaml: Any = importlib.import_module("yaml")
    except ImportError as error:
        raise ImportError(
            f"{path}: reading YAML needs PyYAML: pip install pyyaml, or pass the plan's fields to "
            "ShardingPlan.from_dict"
        ) from error

    class UniqueKeys(yaml.SafeLoader):  # type: ignore[misc]
        """A loader that raises for duplicate keys."""

    def construct_mapping(loader: Any, node: Any) -> dict[Any, Any]:
        # Keys that a merge key (<<) brings in may be overridden, so they do not count.
        nodes = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        keys = [loader.construct_object(key, deep=True) for key in nodes]
        for index, key in enumerate(keys):
            if key in keys[:index]:
                line = nodes[index].start_mark.line + 1
                raise ValueError(f"{path}: line {line}: the key {key!r} occurs twice")
        loader.flatten_mapping(node)
        return dict(loader.construct_pairs(node, deep=True))

    UniqueKeys.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, construct_mapping)
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=UniqueKeys)
    except yaml.YAMLError as error:
        raise ValueError(
            f"{path}: not YAML: {error}; put quotes around a pattern that starts with '*' or '{{', "
            "or has braces inside [...] or {...}"
        ) from None
