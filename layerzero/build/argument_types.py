"""Checks of single `ZeRO3` arguments, made before anything is changed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any, get_args

import torch
from torch import nn

from layerzero.build.device import check_device_type
from layerzero.config import (
    Accumulation,
    BackwardPrefetch,
    GradientReduction,
    MixedPrecision,
    OffloadPolicy,
    OnNonFinite,
    OptionalMean,
    ReshardAfterForward,
    Verify,
    parse_nbytes,
)
from layerzero.flat.groups import require_timeout
from layerzero.flat.placement import Outer
from layerzero.step.root import root_if_alive
from layerzero.step.unit import get_unit

_EXPECTED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "accumulation": (get_args(Accumulation), "'sharded', 'unsharded' or 'auto'"),
    "backward_prefetch": ((BackwardPrefetch, None), "a BackwardPrefetch or None"),
    "deterministic": ((bool,), "True or False"),
    "gradient_reduction": (get_args(GradientReduction), "'mean' or 'sum'"),
    "hook_module": ((nn.Module, None), "an nn.Module or None"),
    "mixed_precision": ((MixedPrecision, None), "a MixedPrecision or None"),
    "move_inputs": ((bool,), "True or False"),
    "offload": ((OffloadPolicy, None), "an OffloadPolicy or None"),
    "on_nonfinite": ((*get_args(OnNonFinite), None), "'raise', 'skip' or None"),
    "optional_mean": (get_args(OptionalMean), "'all' or 'participants'"),
    "outer": (get_args(Outer), "'zero1', 'replicate' or 'shard'"),
    "sync_module_states": ((bool,), "True or False"),
    "verify": ((*get_args(Verify), None), "'sampled', 'always' or None"),
    "zero3_size": ((int, None), "an int or None"),
}
"""Classes or values that each argument may have, and the text that names them."""


def check(**given: object) -> None:
    """Check arguments by name; those of `_EXPECTED`.

    Raises:
        TypeError: one has another class.
        ValueError: one has none of the values.
    """
    for name, value in given.items():
        allowed, text = _EXPECTED[name]
        if value is None and None in allowed:
            continue
        classes = tuple(each for each in allowed if isinstance(each, type))
        # A bool is an int.
        is_class = isinstance(value, classes) and isinstance(value, bool) == (bool in classes)
        if not (is_class if classes else value in allowed):
            error = TypeError if classes else ValueError
            raise error(f"{name}: expected {text}, got {value!r}")


def check_timeout(timeout: object) -> None:
    if timeout is not None and not isinstance(timeout, timedelta):
        is_number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
        raise TypeError(
            f"timeout: expected a datetime.timedelta or None, got {timeout!r}"
            + (f"; for seconds timedelta(seconds={timeout})" if is_number else "")
        )
    if timeout is not None:
        require_timeout(timeout)


def check_param_init_fn(value: object) -> None:
    if value is not None and value != "later" and not callable(value):
        raise TypeError(f"param_init_fn: expected a function of a module or None, got {value!r}")


def check_device(device: object) -> None:
    """Raise if `device` is not a device, or one that the engine cannot run on here."""
    if device is not None:
        check_device_type(named_device(device), f"device={device!r}")


def named_device(device: object) -> torch.device:
    """The device that an argument names; it need not exist here."""
    if isinstance(device, bool) or not isinstance(device, (torch.device, str, int)):
        raise TypeError(
            f"device: expected a torch.device, a string such as 'cuda:0', the index of an "
            f"accelerator or None, got {device!r}"
        )
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device: {device!r} is not a device of torch: {error}") from None


def check_ignored(
    root: nn.Module, modules: object, parameters: object
) -> tuple[tuple[nn.Module, ...], tuple[nn.Parameter, ...]]:
    """The two arguments as tuples.

    Raises:
        TypeError: an argument is not an iterable of modules or of parameters, respectively.
        ValueError: `root` itself is ignored, or a module that is sharded already.
    """
    ignored = _several(modules, nn.Module, "ignored_modules", "modules")
    for module in ignored:
        if module is root:
            raise ValueError(
                f"ignored_modules: contains the wrapped {type(root).__name__} itself, so nothing "
                "would be left to shard; do not wrap it, or list modules inside it"
            )
        if get_unit(module) is not None:
            raise ValueError(
                f"ignored_modules: contains a {type(module).__name__} that is sharded already; "
                "remove it from the list: units of an earlier ZeRO3 stay as they are"
            )
    return ignored, _several(parameters, nn.Parameter, "ignored_parameters", "parameters")


def _several(values: object, kind: type[Any], name: str, what: str) -> tuple[Any, ...]:
    is_one = isinstance(values, (str, torch.Tensor))
    if is_one or not isinstance(values, Iterable):
        got = type(values).__name__ if isinstance(values, nn.Module) else repr(values)
        raise TypeError(f"{name}: expected an iterable of {what}, got {got}")
    listed = tuple(values)
    for value in listed:
        if isinstance(value, kind):
            continue
        if isinstance(value, str):
            advice = f"; names are not looked up, pass the {what} themselves"
        elif isinstance(value, nn.Module):
            advice = "; modules belong in ignored_modules"
        elif isinstance(value, nn.Parameter) and name == "ignored_modules":
            advice = "; parameters belong in ignored_parameters"
        else:
            advice = ""
        got = type(value).__name__ if isinstance(value, (nn.Module, torch.Tensor)) else repr(value)
        raise TypeError(f"{name}: expected {what}, got {got}{advice}")
    return listed


def check_optional_modules(modules: object) -> tuple[nn.Module, ...]:
    """The argument as a tuple. Raises TypeError unless it is an iterable of modules."""
    listed: tuple[nn.Module, ...] = _several(modules, nn.Module, "optional_modules", "modules")
    return listed


def check_module(module: nn.Module) -> None:
    if not isinstance(module, nn.Module):
        several = (
            ": put one module around them; or do not make them units, then they are gathered with "
            "the unit around them (docs/reference/migrating.md)"
        )
        raise TypeError(
            f"ZeRO3: expected an nn.Module, got {type(module).__name__}"
            + (several if isinstance(module, (list, tuple)) else "")
        )
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


def check_layout(value: object) -> int | None:
    """The number of rows of which borders between shards lie at multiples; None: at any element."""
    found = re.fullmatch(r"rows(?:\(([1-9]\d*)\))?", value) if isinstance(value, str) else None
    if found is None and value != "elements":
        raise ValueError(
            "layout: expected 'elements', 'rows', or 'rows(32)' for borders at multiples of 32 "
            f"rows, got {value!r}"
        )
    return None if found is None else int(found[1] or 1)


def check_memory_budget(value: object, reshards: object, prefetch_is_default: bool) -> int | None:
    """The budget in bytes.

    Raises:
        TypeError, ValueError: it is none; or an argument is given whose value it chooses.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise TypeError(
            f"memory_budget: expected a size such as '40GB', bytes (an int) or None, got {value!r}"
        )
    nbytes = parse_nbytes(value, "memory_budget")
    if reshards is not True or not prefetch_is_default:
        raise ValueError(
            "memory_budget: chooses what stays full and what is prefetched; leave out "
            "reshard_after_forward, forward_prefetch, backward_prefetch, limit_all_gathers and "
            "prefetch"
        )
    return nbytes


def check_reshard_after_forward(value: object) -> ReshardAfterForward:
    if value == "compute_shard":
        return "compute_shard"
    if isinstance(value, bool):
        return value
    advice = ""
    if isinstance(value, int):
        advice = (
            f"; for shards over {value} ranks use zero3_size={value}, outer='shard', "
            "reshard_after_forward='compute_shard'"
        )
    raise ValueError(
        f"reshard_after_forward: expected True, False or 'compute_shard', got {value!r}{advice}"
    )
