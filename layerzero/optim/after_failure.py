"""Checks at each optimizer step what became of the backward before it.

After a collective failed `.grad` may be half written: the step is refused. Where the engine keeps
something of the step (step/placeholders.py), the optimizer sees no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from layerzero.optim import attach
from layerzero.optim.in_backward import whole_groups
from layerzero.optim.sharded_params import live_roots, owners
from layerzero.step.root import RootState


def skipping_models(optimizer: torch.optim.Optimizer) -> list[RootState]:
    """Models of its parameters whose step `on_nonfinite="skip"` leaves out."""
    return [*models_of(optimizer, lambda root: root.reducer.kept.is_skipping)]


def models_of(
    optimizer: torch.optim.Optimizer, are_meant: Callable[[RootState], bool]
) -> Iterator[RootState]:
    """Models of its parameters; those that are not meant cost little time."""
    for root in live_roots():
        if are_meant(root):
            own = {id(parameter) for group in whole_groups(optimizer) for parameter in group}
            if any(id(each.sharded_param) in own for each in owners(root)):
                yield root


@attach.on_sharded_params
def _look_after_steps(optimizer: torch.optim.Optimizer) -> None:
    optimizer.register_step_pre_hook(_before_step)
    optimizer.register_step_post_hook(_after_step)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """
    Raises:
        CollectiveError: a collective failed in the model of one of the parameters.
    """
    for root in models_of(optimizer, lambda root: root.operations.failure is not None):
        root.operations.refuse()
    for root in models_of(optimizer, _keeps_any):
        root.reducer.kept.before_step()


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for root in models_of(optimizer, _keeps_any):
        root.reducer.kept.after_step()


def _keeps_any(root: RootState) -> bool:
    return root.reducer.kept.is_any
