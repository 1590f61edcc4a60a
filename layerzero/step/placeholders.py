"""Placeholders: zeros in `.grad`, by which the engine detects that a program gives up a step.

After a pass that failed, the sums of earlier micro-batches stay, so that the pass can be run again;
after a step that `on_nonfinite="skip"` leaves out, later backwards of the same step are dropped,
too. Both end when the program clears its gradients. torch has no hook for that; but the
placeholder is then gone (`zero_grad()`, `.grad = None`), or was written (`set_to_none=False`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn


class _Placed(NamedTuple):
    parameter: nn.Parameter
    grad: torch.Tensor
    is_ours: bool
    """False for a gradient that was there already."""
    version: int | None
    """Version at which the placeholder was put; None: writes into it mean nothing."""


class Placeholders:
    """The placeholders of one model."""

    def __init__(self) -> None:
        self._placed: list[_Placed] = []

    def put(self, parameters: Iterable[nn.Parameter], watch_writes: bool) -> None:
        """Put one into each `.grad` that is None. Does nothing while some are placed.

        Args:
            watch_writes: a write means that the step is given up. Not where the program clips or
                unscales gradients next.
        """
        if self._placed:
            return
        for parameter in parameters:
            is_ours = parameter.grad is None
            if is_ours:
                parameter.grad = torch.zeros_like(parameter)
            assert parameter.grad is not None, "set above"
            version = parameter.grad._version if is_ours and watch_writes else None
            self._placed.append(_Placed(parameter, parameter.grad, is_ours, version))

    @property
    def are_placed(self) -> bool:
        return bool(self._placed)

    @property
    def are_cleared(self) -> bool:
        """Whether the program has cleared gradients since they were put."""
        return any(
            parameter.grad is not grad or (version is not None and grad._version != version)
            for parameter, grad, _, version in self._placed
        )

    def take(self) -> bool:
        """Remove them, so that `.grad` is what the program expects; returns whether any was."""
        placed, self._placed = self._placed, []
        for parameter, grad, is_ours, _ in placed:
            if is_ours and parameter.grad is grad:
                parameter.grad = None
        return bool(placed)
