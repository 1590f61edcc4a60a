"""The optimizer's step, unit by unit, while gradients still arrive."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from weakref import WeakSet

import torch
from torch import nn

from layerzero.runtime.unit import Unit

_narrowed: WeakSet[torch.optim.Optimizer] = WeakSet()
"""Those that step right now with a part of their groups."""


def is_narrowed(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its groups are not what they were made of."""
    return optimizer in _narrowed


class StepInBackward:
    """Runs an element-wise optimizer on a few parameters at a time.

    Its param groups are narrowed to those parameters for the time of the call, so hyperparameters,
    state and hooks are the optimizer's own.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, units: Sequence[Unit]) -> None:
        """`units`: all of the model."""
        self.optimizer = optimizer
        self._pieces = [piece for unit in units for piece in unit.pieces]

    def step_unit(self, unit: Unit | None) -> None:
        """Step the pieces of a unit; None: at the end, what belongs to no unit."""
        if unit is not None:
            self.step(unit.pieces)
        else:
            self.step_others(self._pieces)

    def step(self, parameters: Iterable[nn.Parameter]) -> None:
        """One step of those of `parameters` that the optimizer has; the others are left alone."""
        wanted = set(parameters)
        with self._narrowed(lambda parameter: parameter in wanted) as has_any:
            if has_any:
                self.optimizer.step()

    def step_others(self, done: Iterable[nn.Parameter]) -> None:
        """One step of all parameters but `done`."""
        without = set(done)
        with self._narrowed(lambda parameter: parameter not in without) as has_any:
            if has_any:
                self.optimizer.step()

    @contextmanager
    def _narrowed(self, keeps: Callable[[nn.Parameter], bool]) -> Iterator[bool]:
        groups = self.optimizer.param_groups
        everything = [group["params"] for group in groups]
        _narrowed.add(self.optimizer)
        for group, parameters in zip(groups, everything, strict=True):
            group["params"] = [parameter for parameter in parameters if keeps(parameter)]
        try:
            yield any(group["params"] for group in groups)
        finally:
            _narrowed.discard(self.optimizer)
            for group, parameters in zip(groups, everything, strict=True):
                group["params"] = parameters
