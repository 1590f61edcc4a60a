"""Finds and replaces tensors inside the inputs and outputs of modules.

Containers are tuples (also named ones), lists, mappings and dataclasses, nested in any way. Other
objects are opaque, except that `find_tensors` searches their attributes.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch

_LEAVES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


def find_tensors(value: Any, depth: int = 8) -> Iterator[torch.Tensor]:
    """Every tensor in `value`; one that occurs twice is yielded twice.

    `depth` bounds the objects inside each other whose attributes it searches: they may be a cycle.
    """
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, _LEAVES):
        return
    elif isinstance(value, (tuple, list, set, frozenset, deque)):
        for item in value:
            yield from find_tensors(item, depth)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from find_tensors(item, depth)
    elif depth and not isinstance(value, (type, torch.nn.Module)) and not callable(value):
        for item in getattr(value, "__dict__", {}).values():
            yield from find_tensors(item, depth - 1)
        for name in chain.from_iterable(map(_slots_of, type(value).__mro__)):
            yield from find_tensors(getattr(value, name, None), depth - 1)


def _slots_of(cls: type) -> Iterable[str]:
    slots = vars(cls).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else slots


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """`value` with `function` applied to every tensor; unchanged containers are shared."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, _LEAVES):
        return value
    if isinstance(value, (tuple, list)):
        items = [map_tensors(function, item) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        if hasattr(value, "_fields"):
            return type(value)(*items)
        return type(value)(items)
    if isinstance(value, Mapping):
        changes = {key: map_tensors(function, item) for key, item in value.items()}
        if all(changes[key] is value[key] for key in changes):
            return value
        replaced = copy.copy(value)
        for key, item in changes.items():
            replaced[key] = item  # type: ignore[index]
        return replaced
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        rebuilt: Any = None
        for field in dataclasses.fields(value):
            old = getattr(value, field.name, None)
            new = map_tensors(function, old)
            if new is not old:
                rebuilt = copy.copy(value) if rebuilt is None else rebuilt
                object.__setattr__(rebuilt, field.name, new)
        return value if rebuilt is None else rebuilt
    return value


def move(value: Any, device: torch.device) -> Any:
    """`value` with every tensor on `device`; does not wait for copies from pinned memory."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        is_there = tensor.device == device or tensor.is_meta
        return tensor if is_there else tensor.to(device, non_blocking=True)

    return map_tensors(moved, value)


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """`value` with every floating-point tensor cast to `dtype`."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return map_tensors(cast, value)
