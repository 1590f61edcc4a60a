"""Learning of every torch optimizer that is given pieces of a wrapped model.

Code that must know registers a function here, once, at import:

    @attach.on_pieces
    def _show_shards(optimizer): ...      # it has just been given its first piece

    @attach.on_first_step
    def _warn(optimizer): ...             # its param groups are what it will train

Why by two wrapped methods of `torch.optim.Optimizer`, and what else was possible:
docs/internals/decisions/0018-optimizers-are-met-where-they-get-parameters.md.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from layerzero.core.parameter_info import get_info

_Function = Callable[[torch.optim.Optimizer], None]

_ATTACHED = "_layerzero_attached"
"""Set on an optimizer. A copy that has lost its hooks (`copy`, `pickle`) has lost this, too."""

_on_pieces: list[_Function] = []
_on_first_step: list[_Function] = []


def on_pieces(function: _Function) -> _Function:
    """Have `function(optimizer)` called when an optimizer is given its first piece.

    Its hook dicts are there then, its state is empty, and further groups may follow. A copy or an
    unpickled optimizer counts as another one.
    """
    _on_pieces.append(function)
    return function


def on_first_step(function: _Function) -> _Function:
    """Have `function(optimizer)` called before the first `step()` of an optimizer with pieces."""
    _on_first_step.append(function)
    return function


def holds_pieces(optimizer: torch.optim.Optimizer) -> bool:
    """Whether any of its parameters is a piece of a wrapped model."""
    return any(_has_piece(group) for group in optimizer.param_groups)


def watch() -> None:
    """Begin to look at what optimizers are given; before this, none can have been given a piece."""
    if not hasattr(torch.optim.Optimizer.add_param_group, _ATTACHED):
        _look_after("add_param_group")
        _look_after("__setstate__")


def look_at(optimizer: torch.optim.Optimizer) -> None:
    """Attach to an optimizer that was given pieces past `add_param_group`."""
    if holds_pieces(optimizer):
        _attach(optimizer)


def _look_after(method: str) -> None:
    """Wrap a method of every optimizer to attach to it afterwards."""
    original = getattr(torch.optim.Optimizer, method)

    @functools.wraps(original)
    def wrapped(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        # The newest group alone: a model with many groups would be gone through for each.
        newest = self.param_groups[-1:] if method == "add_param_group" else self.param_groups
        if any(_has_piece(group) for group in newest):
            _attach(self)

    setattr(wrapped, _ATTACHED, True)
    setattr(torch.optim.Optimizer, method, wrapped)


def _has_piece(group: dict[str, Any]) -> bool:
    return any(get_info(parameter) is not None for parameter in group["params"])


def _attach(optimizer: torch.optim.Optimizer) -> None:
    if _ATTACHED in optimizer.__dict__:
        return
    setattr(optimizer, _ATTACHED, True)
    for function in _on_pieces:
        function(optimizer)
    waiting = list(_on_first_step)

    # It stays, and finds nothing to do: torch walks over the hooks while it calls them.
    def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        while waiting:
            waiting[0](optimizer)
            waiting.pop(0)  # Not before: one that refuses the optimizer refuses it again.

    optimizer.register_step_pre_hook(before_step)
