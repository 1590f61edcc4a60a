"""Detects every torch optimizer that is given sharded parameters, and runs callbacks on it.

Callbacks are registered once, at import:

    @attach.on_sharded_params
    def _show_shards(optimizer): ...      # it has just been given its first sharded parameter

    @attach.on_first_step
    def _warn(optimizer): ...             # its param groups are complete

It wraps two methods of `torch.optim.Optimizer`. For the reasons and alternatives see
docs/internals/decisions/0018-optimizers-are-recognised-by-their-parameters.md.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from layerzero.core.parameter_info import get_info

_Function = Callable[[torch.optim.Optimizer], None]

_ATTACHED = "_layerzero_attached"
"""Mark on an optimizer. Copies (`copy`, `pickle`) lose their hooks, and this mark with them."""

_on_sharded_params: list[_Function] = []
_on_first_step: list[_Function] = []


def on_sharded_params(function: _Function) -> _Function:
    """Call `function(optimizer)` when an optimizer is given its first sharded parameter.

    At that time its hook dicts exist, its state is empty, and further groups may follow. A copy or
    an unpickled optimizer counts as a new one.
    """
    _on_sharded_params.append(function)
    return function


def on_first_step(function: _Function) -> _Function:
    """Call `function(optimizer)` before its first `step()`, if it has sharded parameters."""
    _on_first_step.append(function)
    return function


def holds_sharded_params(optimizer: torch.optim.Optimizer) -> bool:
    """Whether any of its parameters is a sharded parameter of a wrapped model."""
    return any(_has_sharded_param(group) for group in optimizer.param_groups)


def watch() -> None:
    """Start checking the parameters of optimizers. Called before any sharded parameter exists."""
    if not hasattr(torch.optim.Optimizer.add_param_group, _ATTACHED):
        _look_after("add_param_group")
        _look_after("__setstate__")


def look_at(optimizer: torch.optim.Optimizer) -> None:
    """Attach to an optimizer whose sharded parameters did not come through `add_param_group`."""
    if holds_sharded_params(optimizer):
        _attach(optimizer)


def _look_after(method: str) -> None:
    """Wrap a method of all optimizers, to attach to the optimizer after each call."""
    original = getattr(torch.optim.Optimizer, method)

    @functools.wraps(original)
    def wrapped(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        # Only the newest group: checking all of them for each new one would take quadratic time.
        newest = self.param_groups[-1:] if method == "add_param_group" else self.param_groups
        if any(_has_sharded_param(group) for group in newest):
            _attach(self)

    setattr(wrapped, _ATTACHED, True)
    setattr(torch.optim.Optimizer, method, wrapped)


def _has_sharded_param(group: dict[str, Any]) -> bool:
    return any(get_info(parameter) is not None for parameter in group["params"])


def _attach(optimizer: torch.optim.Optimizer) -> None:
    if _ATTACHED in optimizer.__dict__:
        return
    setattr(optimizer, _ATTACHED, True)
    for function in _on_sharded_params:
        function(optimizer)
    waiting = list(_on_first_step)

    # The hook is never removed, since torch iterates over the hooks while it calls them.
    def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        while waiting:
            waiting[0](optimizer)
            waiting.pop(0)  # After the call: a function that raises does so at each step.

    optimizer.register_step_pre_hook(before_step)
