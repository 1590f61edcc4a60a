"""Ends what a model keeps of a step that failed or was skipped, when an optimizer begins a new one.

`zero_grad` drops the sums of micro-batches that a pass which failed has left, as it drops `.grad`.
A step that `on_nonfinite="skip"` leaves out ends at `zero_grad` or at the optimizer's `step`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from layerzero.optim import attach
from layerzero.optim.in_backward import whole_groups
from layerzero.runtime import leftovers
from layerzero.runtime.root import RootState
from layerzero.runtime.sharded_params import owners

_WATCHED = "_layerzero_watched"


def models_with_leftovers(optimizer: torch.optim.Optimizer) -> list[RootState]:
    """Models of the optimizer's parameters that keep something of an earlier step."""
    found = [root for root in leftovers.have() if isinstance(root, RootState)]
    if found:
        own = {id(parameter) for group in whole_groups(optimizer) for parameter in group}
        found = [r for r in found if any(id(each.sharded_param) in own for each in owners(r))]
    return found


def begin(optimizer: torch.optim.Optimizer) -> None:
    """The optimizer's `zero_grad` was called."""
    for root in models_with_leftovers(optimizer):
        leftovers.drop(root)


def watch() -> None:
    """Call `begin` after each `zero_grad` of torch's optimizers. Classes with one of their own that
    does not call torch's have to call it themselves."""
    original = torch.optim.Optimizer.zero_grad
    if hasattr(original, _WATCHED):
        return

    @functools.wraps(original)
    def zero_grad(self: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        original(self, set_to_none)
        begin(self)

    setattr(zero_grad, _WATCHED, True)
    torch.optim.Optimizer.zero_grad = zero_grad  # type: ignore[method-assign]


@attach.on_sharded_params
def _look_after_steps(optimizer: torch.optim.Optimizer) -> None:
    optimizer.register_step_post_hook(_after_step)


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for root in models_with_leftovers(optimizer):
        root.reducer.stop_skipping()
