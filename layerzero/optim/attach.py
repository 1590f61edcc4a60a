"""Detects every torch optimizer that is given sharded parameters, and runs callbacks on it.

Callbacks are registered once, when the file that has them is imported:

    @attach.on_sharded_params
    def _show_shards(optimizer): ...      # it has just been given its first sharded parameter

    @attach.on_first_step
    def _warn(optimizer): ...             # its param groups are complete

It wraps two methods of `torch.optim.Optimizer`. For the reasons and alternatives see
docs/internals/decisions/0018-optimizers-are-recognised-by-their-parameters.md.

A full parameter that a sharded one stands for (the original, taken before wrapping; or one gathered
by `unshard()` or `summon_full_params`) would train nothing. An optimizer that is given one gets the
sharded one instead; an optimizer that was built before, at its next step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from layerzero.flat.parameter_info import get_info, sharded_param_of

_Function = Callable[[torch.optim.Optimizer], None]

_WRAPPED = "_layerzero_wrapped"
"""Mark on a method that is wrapped."""

WAITING = "_layerzero_waiting"
"""Attribute of an optimizer: functions to call before its first step. Copies (`copy`, `pickle`)
lose their hooks, and this attribute with them."""

_on_sharded_params: list[_Function] = []
_on_first_step: list[_Function] = []
_before_first: list[Callable[[], None]] = []
"""Functions that `watch` was given; each is called before the next attachment, then dropped."""


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


def watch(before_first: Callable[[], None]) -> None:
    """Start checking the parameters of optimizers. Called before any optimizer has a sharded one.
    `before_first`: imports the files that register callbacks; called when an optimizer is next
    given sharded parameters."""
    if before_first not in _before_first:
        _before_first.append(before_first)
    if not hasattr(torch.optim.Optimizer.add_param_group, _WRAPPED):
        _look_after("add_param_group")
        _look_after("__setstate__")


def look_at(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer sharded parameters for full ones that they stand for, and attach to it, if
    it has sharded parameters that did not come through `add_param_group`."""
    for group in optimizer.param_groups:
        for place, parameter in enumerate(group["params"]):
            sharded = sharded_param_of(parameter)
            if sharded is None:
                continue
            if parameter in optimizer.state:
                info = get_info(sharded)
                raise RuntimeError(
                    f"{type(optimizer).__name__} was built before wrapping and has state for the "
                    f"full {info.fqn if info else 'parameter'!r}: build it again from the wrapped "
                    "model's parameters()"
                )
            # In place: the optimizer may have other references to the list.
            group["params"][place] = sharded
    if holds_sharded_params(optimizer):
        _attach(optimizer)


def _look_after(method: str) -> None:
    """Wrap a method of all optimizers, to attach to the optimizer after each call."""
    original = getattr(torch.optim.Optimizer, method)

    @functools.wraps(original)
    def wrapped(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        group = args[0] if args else kwargs.get("param_group")
        if method == "add_param_group" and isinstance(group, dict) and "params" in group:
            group["params"] = with_sharded(group["params"])
        original(self, *args, **kwargs)
        # Only the newest group: checking all of them for each new one would take quadratic time.
        newest = self.param_groups[-1:] if method == "add_param_group" else self.param_groups
        if any(_has_sharded_param(group) for group in newest):
            _attach(self)

    setattr(wrapped, _WRAPPED, True)
    setattr(torch.optim.Optimizer, method, wrapped)


def with_sharded(given: Any) -> Any:
    """What `params` of a group may be (a tensor, tensors, pairs of name and tensor), with sharded
    parameters for full ones that they stand for."""
    if isinstance(given, torch.Tensor):
        given = [given]
    if isinstance(given, set):
        return given  # torch refuses it.
    listed = list(given)
    for place, each in enumerate(listed):
        named = isinstance(each, tuple)
        tensor = each[1] if named else each
        if isinstance(tensor, torch.Tensor) and (sharded := sharded_param_of(tensor)) is not None:
            listed[place] = (each[0], sharded) if named else sharded
    return listed


def _has_sharded_param(group: dict[str, Any]) -> bool:
    return any(get_info(parameter) is not None for parameter in group["params"])


def _attach(optimizer: torch.optim.Optimizer) -> None:
    if WAITING in optimizer.__dict__:
        return
    while _before_first:
        _before_first.pop()()
    setattr(optimizer, WAITING, [*_on_first_step])
    # One that wraps another and is not initialised (Lookahead, OrthoGrad) leaves the rest to it.
    is_initialised = "_optimizer_state_dict_post_hooks" in vars(optimizer)
    for function in _on_sharded_params if is_initialised else ():
        function(optimizer)
