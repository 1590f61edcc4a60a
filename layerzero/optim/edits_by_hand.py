"""Finds by what a program has multiplied gradients or weights, for ranks to compare.

    total = sum(p.grad.pow(2).sum() for p in model.parameters()).sqrt()
    for p in model.parameters():
        p.grad.mul_(1 / total)              # `total` is of this rank's parts, not of all gradients

However the number came about, each rank multiplies by another one. So a few elements of each
gradient are kept as backward leaves them, and as the step has them; and of each weight as a step
leaves it, and as it is after the next backward. The line through these pairs tells the factor.
Clamps, noise and masks lie on no line, and are not looked at.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from layerzero.core.data_watch import grad_of
from layerzero.core.parameter_info import get_info
from layerzero.runtime.backward_inputs import after_backward

_NUM_SAMPLES = 16
_MIN_SAMPLES = 4
"""A line goes through any two pairs; more must lie on it."""
_MAX_BACKWARDS = 256
"""Without a step: then the program has gone on to another optimizer."""
_TOLERANCE = 1e-3
"""Factors of two ranks that differ by less, relative to the larger, count as equal."""


class Edit(NamedTuple):
    """Each element was multiplied by `factor`, and `offset` was added."""

    factor: float
    offset: float
    tolerance: float
    """Relative error that the dtype leaves in both."""

    def __str__(self) -> str:
        times = f"{self.factor:.3g} times as large"
        return (
            times
            if not self.offset
            else f"{times} and {abs(self.offset):.3g} "
            + ("larger" if self.offset > 0 else "smaller")
        )


_Samples = dict[str, torch.Tensor]
"""Some elements of each tensor, by the parameter's name."""
Edits = Mapping[str, Edit]
"""By parameter: those of which it could be told."""


def fit(old: Sequence[float], new: Sequence[float], eps: float) -> Edit | None:
    """The edit that makes `new` of `old`; None if there is none, or the values do not tell.

    Args:
        eps: relative rounding error of the values.
    """
    if len(old) < _MIN_SAMPLES or not all(map(math.isfinite, (*old, *new))):
        return None
    mean, new_mean = math.fsum(old) / len(old), math.fsum(new) / len(new)
    spread = math.fsum((o - mean) ** 2 for o in old)
    reach, new_reach = max(map(abs, old)), max(map(abs, new))
    if spread <= (1e-2 * reach) ** 2:
        return None
    factor = math.fsum((o - mean) * (n - new_mean) for o, n in zip(old, new, strict=True)) / spread
    offset = new_mean - factor * mean
    rounding = 4 * eps * max(new_reach, factor * reach)
    if factor <= 0 or any(
        abs(n - factor * o - offset) > rounding for o, n in zip(old, new, strict=True)
    ):
        return None
    if abs(offset) <= 2 * rounding:
        offset = 0.0
    return Edit(factor, offset, _TOLERANCE + 4 * eps)


def difference(own: Edits, theirs: Edits) -> tuple[str | None, Edit, Edit] | None:
    """(name of a parameter, the edit of each of two ranks), if these differ.

    The name is None if each rank multiplied all its parts by one factor: most parameters lie on one
    rank alone, so few can be compared by themselves.
    """
    ours, others = _common(own), _common(theirs)
    if ours is not None and others is not None and _differ(ours, others):
        return None, ours, others
    for name, edit in own.items():
        other = theirs.get(name)
        if other is not None and _differ(edit, other):
            return name, edit, other
    return None


def is_edited(edit: Edit) -> bool:
    return edit.offset != 0 or _are_apart(edit.factor, 1.0, edit.tolerance)


def _differ(one: Edit, other: Edit) -> bool:
    tolerance = max(one.tolerance, other.tolerance)
    if _are_apart(one.factor, other.factor, tolerance):
        return True
    # An offset is the small difference of large numbers.
    return one.offset * other.offset != 0 and _are_apart(one.offset, other.offset, 30 * tolerance)


def _are_apart(one: float, other: float, tolerance: float) -> bool:
    return abs(one - other) > tolerance * max(abs(one), abs(other))


def _common(edits: Edits) -> Edit | None:
    """The factor that all parts of a rank were multiplied by; None if they were not, or are too few
    to tell whether that was meant for all: a program may well scale the gradients of its head."""
    values = [*edits.values()]
    if len(values) < 2 or not all(map(is_edited, values)) or any(each.offset for each in values):
        return None
    if any(_are_apart(each.factor, values[0].factor, each.tolerance) for each in values):
        return None
    return values[0]


class EditsByHand:
    """What a program does to the gradients and weights of one optimizer before its next step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._gradients: _Samples = {}
        """After the last backward."""
        self._weights: list[_Samples] = []
        """After the last step, and after the first backward since."""
        self._num_backwards = 0

    def watch(self) -> None:
        """Look until the next step. Each backward then costs a small copy for each parameter."""
        self._num_backwards = 0
        self._weights = [self._take(_weight)]
        if self._after_backward not in after_backward:
            after_backward.append(self._after_backward)

    def stop(self) -> None:
        self._gradients, self._weights = {}, []
        if self._after_backward in after_backward:
            after_backward.remove(self._after_backward)

    def after_step(self) -> Callable[[], dict[str, Edits]]:
        """Stop looking. Does not wait for a device.

        Returns:
            A function that reads the edits of gradients and of weights from the device, which must
            have come here.
        """
        pairs = {}
        if self._gradients:
            pairs["gradient"] = self._gradients, self._take(grad_of)
        if len(self._weights) == 2:
            pairs["weight"] = self._weights[0], self._weights[1]
        self.stop()
        return lambda: {kind: _read(old, new) for kind, (old, new) in pairs.items()}

    def _after_backward(self) -> None:
        self._num_backwards += 1
        if self._optimizer() is None or self._num_backwards > _MAX_BACKWARDS:
            self.stop()
        elif torch._C._current_graph_task_id() < 0:  # Else it is a checkpoint's, in a backward.
            self._gradients = self._take(grad_of)
            if len(self._weights) == 1:
                self._weights.append(self._take(_weight))

    def _take(self, of: Callable[[nn.Parameter], torch.Tensor | None]) -> _Samples:
        """Copy some elements of the part, or of its gradient, of each parameter."""
        optimizer, samples = self._optimizer(), {}
        for group in () if optimizer is None else optimizer.param_groups:
            for parameter in group["params"]:
                info = get_info(parameter)
                tensor = None if info is None else of(parameter)
                if info is None or tensor is None or tensor.numel() < _MIN_SAMPLES:
                    continue
                if tensor.dim() == 1 and tensor.is_floating_point():
                    stride = max(1, tensor.numel() // _NUM_SAMPLES)
                    samples[info.fqn] = tensor.detach()[::stride][:_NUM_SAMPLES].clone()
        return samples


def _weight(parameter: nn.Parameter) -> torch.Tensor:
    return parameter


def _read(before: _Samples, now: _Samples) -> Edits:
    edits = {}
    for name, old in before.items():
        new = now.get(name)
        if new is None or new.dtype != old.dtype or new.numel() != old.numel():
            continue
        edit = fit(old.tolist(), new.tolist(), torch.finfo(old.dtype).eps)
        if edit is not None:
            edits[name] = edit
    return edits
