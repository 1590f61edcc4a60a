"""Looks at each step of a torch optimizer, before and after it.

A model wrapped, or a `summon_full_params` left, since the last step may have made its parameters
stale. After a collective failed `.grad` may be half written: the step is refused. Where the engine
keeps something of the step (step/kept_step.py), the optimizer sees no gradient. After a step its
writes are counted (decision 0026).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.optim.optimizer import register_optimizer_step_pre_hook

from layerzero.flat import parameter_info
from layerzero.optim import attach
from layerzero.optim.sharded_params import live_roots, owners
from layerzero.step.root import RootState

_LOOKED = "_layerzero_looked"
"""Attribute of an optimizer: `num_marked` when its parameters were last looked at."""


def watch(before_first: Callable[[], None]) -> None:
    """Look at optimizers and their steps from now on; see `attach.watch`."""
    attach.watch(before_first)
    _watch_steps()


@functools.cache
def _watch_steps() -> None:
    register_optimizer_step_pre_hook(_before_any_step)


def models_of(
    optimizer: torch.optim.Optimizer, are_meant: Callable[[RootState], bool]
) -> Iterator[RootState]:
    """Models of its parameters; those that are not meant cost little time."""
    for root in filter(are_meant, list(live_roots)):
        from layerzero.optim.in_backward import whole_groups

        own = {id(parameter) for group in whole_groups(optimizer) for parameter in group}
        if any(id(each.sharded_param) in own for each in owners(root)):
            yield root


@_disable_dynamo
def _before_any_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    own = optimizer.__dict__
    if own.get(_LOOKED) != parameter_info.num_marked:
        own[_LOOKED] = parameter_info.num_marked
        attach.look_at(optimizer)
    waiting = own.get(attach.WAITING)
    while waiting:
        waiting[0](optimizer)
        waiting.pop(0)  # After the call: a function that raises does so at each step.
    closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer
    for root in [each for each in live_roots if each.join is not None]:
        root.join.before_step(optimizer, closure)


@attach.on_sharded_params
def _look_after_steps(optimizer: torch.optim.Optimizer) -> None:
    # Not in `_before_any_step`, before what joins do: there ranks may follow a backward of others
    # before this one steps.
    optimizer.register_step_pre_hook(_before_step)
    optimizer.register_step_post_hook(_after_step)


@_disable_dynamo
def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Refuse a step after a collective failed in the model of one of the parameters."""
    for root in models_of(optimizer, lambda root: root.operations.failure is not None):
        root.operations.refuse()
    for root in models_of(optimizer, _keeps_any):
        root.reducer.kept.before_step()


@_disable_dynamo
def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    # A step writes what has a gradient. torch's fused kernels (2.14) do not count that, nor do
    # kernels of other libraries, which write through addresses. Our own optimizers do.
    for group in () if hasattr(optimizer, "counts_writes") else optimizer.param_groups:
        written = [parameter for parameter in group["params"] if parameter.grad is not None]
        torch.autograd.graph.increment_version(written)
    for root in models_of(optimizer, _keeps_any):
        root.reducer.kept.after_step()


def _keeps_any(root: RootState) -> bool:
    return root.reducer.kept.is_any
