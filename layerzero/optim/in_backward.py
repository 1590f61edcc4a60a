"""StepInBackward: steps the optimizer unit by unit, as soon as a unit's gradients are complete."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from layerzero.step.unit import Unit

_WHOLE = "_layerzero_whole_groups"
"""Attribute of an optimizer while it steps with only some of its parameters: all of these."""


def is_narrowed(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its groups currently lack some of their parameters."""
    return _WHOLE in optimizer.__dict__


def whole_groups(optimizer: torch.optim.Optimizer) -> list[list[nn.Parameter]]:
    """All parameters of its groups, also those that they currently lack."""
    known: list[list[nn.Parameter]] | None = optimizer.__dict__.get(_WHOLE)
    return [group["params"] for group in optimizer.param_groups] if known is None else known


class StepInBackward:
    """Runs an element-wise optimizer on a few parameters at a time.

    During the call its param groups contain only those parameters; hyperparameters, state and hooks
    stay the optimizer's own.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, units: Sequence[Unit]) -> None:
        """`units`: all units of the model.

        Raises:
            ValueError: the optimizer needs more than the gradients of one unit (a
                `WholeTensorOptimizer`).
        """
        if getattr(optimizer, "needs_all_units", False):
            raise ValueError(
                f"step_in_backward: {type(optimizer).__name__} sends gradients to the owners of "
                "whole tensors, for all units together; call its step() after backward"
            )
        self.optimizer = optimizer
        self._sharded_params = {each for unit in units for each in unit.sharded_params}

    def step_unit(self, unit: Unit | None) -> None:
        """Step those of a unit's parameters that the optimizer has; None, at the end: those that
        belong to no unit."""
        of_units = self._sharded_params if unit is None else {*unit.sharded_params}
        groups, whole = self.optimizer.param_groups, whole_groups(self.optimizer)
        self.optimizer.__dict__[_WHOLE] = whole
        for group, parameters in zip(groups, whole, strict=True):
            group["params"] = [p for p in parameters if (p in of_units) is (unit is not None)]
        try:
            if any(group["params"] for group in groups):
                self.optimizer.step()
        finally:
            del self.optimizer.__dict__[_WHOLE]
            for group, parameters in zip(groups, whole, strict=True):
                group["params"] = parameters
