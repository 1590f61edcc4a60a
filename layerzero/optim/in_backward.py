"""StepInBackward: steps the optimizer unit by unit, as soon as a unit's gradients are complete."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from layerzero.flat.gradients import Gradient
from layerzero.step.extension import Extension
from layerzero.step.reducer import Delivery, Part
from layerzero.step.unit import Unit

_logger = logging.getLogger(__name__)
_WHOLE = "_layerzero_whole_groups"
"""Attribute of an optimizer while it steps with only some of its parameters: all of these."""


def is_narrowed(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its groups currently lack some of their parameters."""
    return _WHOLE in optimizer.__dict__


def whole_groups(optimizer: torch.optim.Optimizer) -> list[list[nn.Parameter]]:
    """All parameters of its groups, also those that they currently lack."""
    known: list[list[nn.Parameter]] | None = optimizer.__dict__.get(_WHOLE)
    return [group["params"] for group in optimizer.param_groups] if known is None else known


class StepInBackward(Extension):
    """Runs an element-wise optimizer on a few parameters at a time.

    During the call its param groups contain only those parameters; hyperparameters, state and hooks
    stay the optimizer's own.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        if getattr(optimizer, "needs_all_units", False):
            raise ValueError(
                f"step_in_backward: {type(optimizer).__name__}: call its step() after backward"
            )
        self.optimizer = optimizer

    def deliver(self, delivery: Delivery, parts: Sequence[Part]) -> None:
        """Deliver one reduction at a time, in the order of issue: the host steps what has arrived
        while the device still computes the rest. Steps cannot be undone."""
        # Each of several nested passes (reentrant checkpoints) may reduce a unit.
        last_of = {unit: index for index, (unit, _) in enumerate(parts)}
        hooked: list[Gradient] = []
        complete: list[Unit] = []
        stepped: list[str] = []
        try:
            for index, (unit, add) in enumerate(parts):
                hooked += add()
                delivery.commit()
                if last_of[unit] == index:
                    complete.append(unit)
                if not hooked:
                    # Parameters with hooks get their gradients below, together; until then neither
                    # their unit nor a later one is stepped.
                    while complete:
                        stepped.append(complete[0].label)
                        self._step(complete.pop(0).sharded_params)
            if hooked:
                delivery.run_hooks(hooked)
            for unit in complete:
                stepped.append(unit.label)
                self._step(unit.sharded_params)
            # Also of units that this backward did not reach: `zero_grad` may have left zeros.
            rest = {each for group in self.optimizer.param_groups for each in group["params"]}
            self._step(rest.difference(*(unit.sharded_params for unit, _ in parts)))
        except BaseException as error:
            text = (
                f"step_in_backward: the parameters of {', '.join(stepped)} had stepped by then, "
                "which cannot be undone: load a checkpoint, or go on with the next batch, but do "
                "not run this one again"
            )
            if stepped and hasattr(error, "add_note"):  # Python 3.11.
                error.add_note(text)
            elif stepped:
                _logger.error(text)
            raise

    def _step(self, parameters: Iterable[nn.Parameter]) -> None:
        wanted = set(parameters)
        groups, whole = self.optimizer.param_groups, whole_groups(self.optimizer)
        self.optimizer.__dict__[_WHOLE] = whole
        for group, members in zip(groups, whole, strict=True):
            group["params"] = [parameter for parameter in members if parameter in wanted]
        try:
            if any(group["params"] for group in groups):
                self.optimizer.step()
        finally:
            del self.optimizer.__dict__[_WHOLE]
            for group, members in zip(groups, whole, strict=True):
                group["params"] = members
