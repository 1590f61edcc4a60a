"""Converts option values of a plan, such as strings from a file, to arguments of `ZeRO3`.

Options come in three levels: the plan's fields, its `defaults`, and a module's own. A level's
`mixed_precision` replaces that of the level above; `param_dtype` and the like override one field.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from layerzero.build.arguments import check
from layerzero.config import FLAG, BackwardPrefetch, MixedPrecision, OffloadPolicy
from layerzero.plan.activations import read_act_ckpt
from layerzero.wrapping.fsdp_arguments import to_offload, to_precision
from layerzero.wrapping.zero3 import KEYWORDS

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
"""Options of `fully_shard`, and of finetuning-scheduler's plans, that have another name here."""


def near_matches(name: str, known: Iterable[str]) -> str:
    """A clause for an error message that lists similar names; empty if there are none."""
    found = difflib.get_close_matches(str(name), list(dict.fromkeys(known)), n=3, cutoff=0.5)
    return f"; near matches: {', '.join(map(repr, found))}" if found else ""


def read_options(where: str, options: Mapping[str, Any], known: Sequence[str]) -> dict[str, Any]:
    """Convert and check the options of one level. `where`: its name in error messages. `known`:
    options that it may have."""
    if not isinstance(options, Mapping):
        raise TypeError(f"{where}: expected a mapping of options, got {options!r}")
    read: dict[str, Any] = {}
    for given, value in options.items():
        name = _TORCHS.get(given, given)
        if name not in known:
            raise ValueError(
                f"{where}: unknown option {name!r} (value {value!r}){near_matches(name, known)}; "
                f"expected one of {sorted(known)}"
            )
        try:
            read[name] = _READERS.get(name, partial(_checked, name))(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise type(error)(f"{where}: {error}") from None
    return read


def _checked(name: str, value: Any) -> Any:
    check(**{name: value})
    return value


def _read_dtype(option: str, value: Any) -> torch.dtype | None:
    """A floating-point dtype, or its name: 'bfloat16', 'bf16' or 'torch.bfloat16'."""
    dtype = value
    if isinstance(value, str):
        name = value.removeprefix("torch.")
        dtype = getattr(torch, {"bf16": "bfloat16"}.get(name, name.replace("fp", "float")), None)
    if value is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        return dtype
    raise ValueError(
        f"{option}: expected a floating-point dtype or its name, such as 'bfloat16' or 'bf16', got "
        f"{value!r}"
    )


def _read_mixed_precision(value: Any) -> MixedPrecision:
    if isinstance(value, Mapping):
        read = dict(value)
        read.update({name: _read_dtype(name, read[name]) for name in DTYPE_OPTIONS if name in read})
        return _make(MixedPrecision, "mixed_precision", read)
    # FSDP1's has rules for the root and batch norms, which a plan expresses by names.
    is_fsdp1 = hasattr(value, "cast_root_forward_inputs")
    converted = value if is_fsdp1 else to_precision(value, nn.Module())[0]
    if not isinstance(converted, MixedPrecision | None):
        raise TypeError(
            "mixed_precision: expected a MixedPrecision, FSDP2's MixedPrecisionPolicy or a mapping "
            f"of its fields, got {value!r}"
        )
    return converted or MixedPrecision()


def _read_cpu_offload(value: Any) -> OffloadPolicy:
    """True and a mapping offload parameters, and with them gradients and optimizer state."""
    if isinstance(value, bool) or value is None:
        return OffloadPolicy(params=bool(value))
    return _read_offload("cpu_offload", value, params=True)


def _read_offload(name: str, value: Any, **defaults: bool) -> OffloadPolicy:
    if isinstance(value, Mapping):
        return _make(OffloadPolicy, name, {**defaults, **value})
    converted = to_offload(value)
    check(offload=converted)
    return converted or OffloadPolicy()


def _make(cls: Any, name: str, fields: Mapping[str, Any]) -> Any:
    try:
        return cls(**fields)
    except TypeError as error:
        raise TypeError(f"{name}: {error}; expected fields of {cls.__name__}") from None


def _read_backward_prefetch(value: Any) -> BackwardPrefetch | None:
    by_name = {each.value: each for each in BackwardPrefetch}
    value = by_name.get(value.lower(), value) if isinstance(value, str) else value
    check(backward_prefetch=value)
    return value


def _read_timeout(value: Any) -> timedelta | None:
    if isinstance(value, (int, float)):
        value = timedelta(seconds=value)
    check(timeout=value)
    return value


_READERS: dict[str, Callable[[Any], Any]] = {
    **{name: partial(_read_dtype, name) for name in DTYPE_OPTIONS},
    "cast_forward_inputs": partial(FLAG, "cast_forward_inputs"),
    "mixed_precision": _read_mixed_precision,
    "cpu_offload": _read_cpu_offload,
    "offload": partial(_read_offload, "offload"),
    "act_ckpt": read_act_ckpt,
    "backward_prefetch": _read_backward_prefetch,
    "timeout": _read_timeout,
}
"""Functions that convert a value, or raise for a bad one."""


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
        ValueError: not YAML.
    """
    try:
        yaml: Any = importlib.import_module("yaml")
    except ImportError as error:
        raise ImportError(f"{path}: reading YAML needs PyYAML: pip install pyyaml") from error
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(
            f"{path}: not YAML: {error}; put quotes around a pattern that starts with '*' or '{{', "
            "or has braces inside [...] or {...}"
        ) from None
