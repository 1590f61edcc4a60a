"""StepInBackward: steps the optimizer unit by unit, as soon as a unit's gradients are complete."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import nn

from layerzero.runtime.unit import Unit

_Groups = list[list[nn.Parameter]]
_narrowed: WeakKeyDictionary[torch.optim.Optimizer, _Groups] = WeakKeyDictionary()
"""Optimizers that are running a step with only some of their parameters, and all of these."""


def is_narrowed(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its groups currently lack some of their parameters."""
    return optimizer in _narrowed


def whole_groups(optimizer: torch.optim.Optimizer) -> _Groups:
    """All parameters of its groups, also those that they currently lack."""
    groups = _narrowed.get(optimizer)
    return [group["params"] for group in optimizer.param_groups] if groups is None else groups


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
        self._sharded_params = [
            sharded_param for unit in units for sharded_param in unit.sharded_params
        ]

    def step_unit(self, unit: Unit | None) -> None:
        """Step the parameters of a unit; None, at the end: those that belong to no unit."""
        if unit is not None:
            self.step(unit.sharded_params)
        else:
            self.step_others(self._sharded_params)

    def step(self, parameters: Iterable[nn.Parameter]) -> None:
        """Run one step on those of `parameters` that the optimizer has."""
        wanted = set(parameters)
        with self._narrowed(lambda parameter: parameter in wanted) as has_any:
            if has_any:
                self.optimizer.step()

    def step_others(self, done: Iterable[nn.Parameter]) -> None:
        """Run one step on all of its parameters except `done`."""
        without = set(done)
        with self._narrowed(lambda parameter: parameter not in without) as has_any:
            if has_any:
                self.optimizer.step()

    @contextmanager
    def _narrowed(self, keeps: Callable[[nn.Parameter], bool]) -> Iterator[bool]:
        groups = self.optimizer.param_groups
        everything = [group["params"] for group in groups]
        _narrowed[self.optimizer] = everything
        for group, parameters in zip(groups, everything, strict=True):
            group["params"] = [parameter for parameter in parameters if keeps(parameter)]
        try:
            yield any(group["params"] for group in groups)
        finally:
            _narrowed.pop(self.optimizer, None)
            for group, parameters in zip(groups, everything, strict=True):
                group["params"] = parameters
