"""The optimizers and schedulers that a checkpoint takes: one, or several by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, Protocol

import torch
from torch import nn

from layerzero.errors import CheckpointError
from layerzero.optim.whole_tensor import WholeTensorOptimizer
from layerzero.state_dict.names import Names

Optimizers = Mapping[str, torch.optim.Optimizer]
"""By name; the name of a single one is ""."""
_NAME = re.compile(r"\w[\w.-]*", re.ASCII)
_SLOT = "$state"
"""Key of a dict that stands for a tensor inside a container."""


class Stateful(Protocol):
    """A learning-rate scheduler, or another object with these two methods."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


def check_schedulers(
    scheduler: Stateful | Mapping[str, Stateful] | None, verb: str
) -> dict[str, Stateful] | None:
    """The schedulers of an argument: one, whose name is "", or several by name; None for None."""
    if scheduler is None:
        return None
    named = dict(scheduler) if isinstance(scheduler, Mapping) else {"": scheduler}
    for name, each in named.items():
        if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
            raise TypeError(
                f"{verb}: scheduler {name!r}: expected an object with state_dict and "
                f"load_state_dict, got {type(each).__name__}"
            )
    return named


def keeps_whole_states(optimizer: torch.optim.Optimizer) -> bool:
    """Whether each state is whole, of any shape, and on one rank."""
    return isinstance(optimizer, WholeTensorOptimizer)


def parameters_with_state(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Its parameters, without those whose whole states are on other ranks."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not isinstance(optimizer, WholeTensorOptimizer):
        return parameters
    return [parameter for parameter in parameters if optimizer.owns(parameter)]


def optimizer_inside(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer whose `step` makes the state: that inside a WholeTensorOptimizer, or itself."""
    inner = optimizer.inner if isinstance(optimizer, WholeTensorOptimizer) else None
    return optimizer if inner is None else inner


def take_tensors(
    value: Any, key: str, takes: Callable[[torch.Tensor], bool] = lambda tensor: True
) -> tuple[Any, dict[str, torch.Tensor]]:
    """Split a container into its tensors, by name, and the rest, with a slot for each tensor.

    Tensors for which `takes` is False stay in the rest.
    """
    tensors: dict[str, torch.Tensor] = {}

    def take(item: Any, name: str) -> Any:
        if isinstance(item, torch.Tensor) and takes(item):
            tensors[name] = item
            return {_SLOT: name}
        return _rebuilt(item, lambda inner, place: take(inner, f"{name}[{place}]"))

    return take(value, key), tensors


def fill_slots(value: Any, tensor_of: Callable[[str], Any]) -> Any:
    """The inverse of `take_tensors`: `tensor_of` is called with the name in each slot."""
    if isinstance(value, dict) and value.keys() == {_SLOT}:
        return tensor_of(value[_SLOT])
    return _rebuilt(value, lambda inner, _: fill_slots(inner, tensor_of))


def _rebuilt(value: Any, change: Callable[[Any, Any], Any]) -> Any:
    if isinstance(value, dict):
        return {key: change(item, key) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(change(item, number) for number, item in enumerate(value))
    return value


def on_device(device: torch.device, value: Any) -> Any:
    """A value whose tensors, also those inside containers, are on `device`, except numbers."""

    def moved(item: Any) -> Any:
        return item.to(device) if isinstance(item, torch.Tensor) and item.ndim else item

    return map_values(value, moved)


def copied(value: Any) -> Any:
    """A copy of a tensor, a shard of one included; anything else as it is."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def map_values(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same nested dicts, lists and tuples, with `change` of what is in them."""
    if isinstance(value, dict) or type(value) in (list, tuple):
        return _rebuilt(value, lambda item, _: map_values(item, change))
    return change(value)


def refuse_shared(optimizers: Optimizers, names: Names) -> None:
    """
    Raises:
        CheckpointError: a parameter does not belong to the model, or is in two optimizers.
    """
    optimizer_of: dict[str, str] = {}
    for name, optimizer in optimizers.items():
        for parameter_name in chain(*names.in_groups(optimizer, name)):
            other = optimizer_of.setdefault(parameter_name, name)
            if other != name:
                raise CheckpointError(
                    f"{parameter_name} is in two optimizers, {other!r} and {name!r}; give each "
                    "parameter to one"
                )


def check_optimizers(optimizer: Any, verb: str) -> dict[str, torch.optim.Optimizer]:
    """The optimizers of an argument: one, whose name is "", or several by name; {} for None.

    Raises:
        TypeError, ValueError: it is something else; a name cannot be saved; an optimizer has a
            state dict of its own.
    """
    if optimizer is None:
        return {}
    if not isinstance(optimizer, Mapping):
        return {"": check_optimizer(optimizer, f"{verb}: optimizer")}
    for name in optimizer:
        if not (isinstance(name, str) and _NAME.fullmatch(name)):
            raise ValueError(
                f"{verb}: optimizer: the name {name!r} cannot be saved; use letters, digits, '_', "
                "'-' and '.', and begin with a letter, a digit or '_'"
            )
    return {n: check_optimizer(each, f"{verb}: optimizer {n!r}") for n, each in optimizer.items()}


def check_optimizer(optimizer: Any, what: str) -> torch.optim.Optimizer:
    if not (hasattr(optimizer, "param_groups") and hasattr(optimizer, "load_state_dict")):
        raise TypeError(
            f"{what}: expected an optimizer, or a dict of optimizers by name, got "
            f"{type(optimizer).__name__}"
        )
    checked: torch.optim.Optimizer = optimizer
    inside = optimizer_inside(checked)
    has_own = type(inside).state_dict is not torch.optim.Optimizer.state_dict
    given = inside.state_dict() if has_own else {"state": inside.state, "param_groups": ()}
    keys = set(given) | {key for key in inside.state if not isinstance(key, torch.Tensor)}
    is_usual = keys == {"state", "param_groups"} and len(given["state"]) == len(inside.state)
    if not (is_usual or isinstance(inside, WholeTensorOptimizer)):
        raise ValueError(
            f"{what}: expected state of {type(inside).__name__} to have parameters as keys, and "
            f"state_dict() to have it and 'param_groups', got {sorted(map(str, keys))}: what else "
            "there is could not be split for other ranks. Keep it in optimizer.state[parameter]; "
            "or pass the optimizer that it wraps, and its numbers in extra="
        )
    return checked
