"""Delivery: writes `.grad` at the end of a backward pass, all of it or nothing."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from layerzero.flat.gradients import Gradient
from layerzero.flat.parameter_hooks import accumulate_with_hooks

_logger = logging.getLogger(__name__)


def note_steps(error: BaseException, units: Sequence[str]) -> None:
    """Add the units that have stepped already to an error of `step_in_backward`."""
    text = (
        f"step_in_backward: the parameters of {', '.join(units)} had stepped by then, which cannot "
        "be undone: load a checkpoint, or go on with the next batch, but do not run this one again"
    )
    if hasattr(error, "add_note"):  # Python 3.11.
        error.add_note(text)
    else:
        _logger.error(text)


class Delivery:
    """The gradients of one pass, on their way to `.grad`."""

    plain: list[Gradient]
    """Gradients that `commit` writes."""

    def __init__(self) -> None:
        self.plain = []
        self._written: list[tuple[nn.Parameter, torch.Tensor | None, torch.Tensor | None]] = []
        """Parameters written early, each with its `.grad` before, and a copy of that."""
        self._cleared: list[nn.Parameter] = []

    def run_hooks(self, hooked: Sequence[Gradient]) -> None:
        """Write the gradients that were added, then those of parameters with hooks, and run these.

        Hooks see all gradients, and may raise. So what is written first is copied, for `undo`.
        """
        for parameter, _ in (*self.plain, *hooked):
            before = parameter.grad
            copied = None if before is None else before.detach().clone()
            self._written.append((parameter, before, copied))
        self._write()
        accumulate_with_hooks(hooked)

    def clear(self, parameters: Iterable[nn.Parameter]) -> None:
        """Write nothing but None, to `.grad` of these parameters."""
        self.plain = []
        self._cleared = [*parameters]

    def commit(self) -> None:
        self._write()
        self._written = []
        cleared, self._cleared = self._cleared, []
        for parameter in cleared:
            parameter.grad = None

    def _write(self) -> None:
        plain, self.plain = self.plain, []
        with torch.no_grad():
            for parameter, gradient in plain:
                if (before := parameter.grad) is None:
                    parameter.grad = gradient
                else:
                    before.add_(gradient)

    def undo(self) -> None:
        """Return `.grad` to what it was, unless `commit` was called."""
        self.plain, self._cleared = [], []
        for parameter, before, copied in reversed(self._written):
            parameter.grad = before
            if before is not None and copied is not None:
                with torch.no_grad():
                    before.copy_(copied)
        self._written = []
