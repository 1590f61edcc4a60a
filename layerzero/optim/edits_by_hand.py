"""Finds by what a program has multiplied gradients between backward and step, and weights between
two steps, for ranks to compare.

    total = sum(p.grad.pow(2).sum() for p in model.parameters()).sqrt()
    for p in model.parameters():
        p.grad.mul_(1 / total)              # `total` is of this rank's parts, not of all gradients
        p.data.div_(p.data.square().mean().sqrt())      # of this rank's part of the weight

However the number came about, each rank multiplies by another one. So a few elements of each
gradient are kept as backward leaves them, and as the step has them; and of each weight, as one step
leaves them and the next one has them. The line through these pairs tells the factor. Clamps, noise
and masks lie on no line, and are not looked at.
"""

from __future__ import annotations

import functools
import itertools
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
"""Factors of gradients on two ranks that differ by less, relative to the larger, count as equal."""
_WEIGHTS_TOLERANCE = 1e-4
"""Of weights: those that are scaled at each step change little by it."""


class Edit(NamedTuple):
    """Each element was multiplied by `factor`, and `offset` was added."""

    factor: float
    offset: float
    tolerance: float
    """Relative error up to which another rank's count as the same."""

    def __str__(self) -> str:
        # With as many digits as tell apart what the smallest tolerance does.
        times = f"{self.factor:.5g} times as large"
        if not self.offset:
            return times
        return f"{times} and {abs(self.offset):.3g} {'larger' if self.offset > 0 else 'smaller'}"


_Samples = dict[str, torch.Tensor]
"""Some elements of each gradient or weight, by the parameter's name."""
Edits = Mapping[str, Edit]
"""By parameter: those of which it could be told."""


def fit(
    old: Sequence[float], new: Sequence[float], eps: float, tolerance: float = _TOLERANCE
) -> Edit | None:
    """The edit that makes `new` of `old`; None if there is none, or the values do not tell.

    Args:
        eps: relative rounding error of the values.
        tolerance: of the edit, but for what rounding adds.
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
    # By so much may values that are off by `rounding` turn the line (Cauchy-Schwarz).
    return Edit(factor, offset, tolerance + math.sqrt(len(old) / spread) * rounding / factor)


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


class GradientEdits:
    """What a program does to the gradients of one optimizer between backward and its next step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._before: _Samples = {}
        """After the last backward."""
        self._num_backwards = 0

    def watch(self) -> None:
        """Look until the next step. Each backward then costs a small copy for each parameter."""
        self._num_backwards = 0
        if self._after_backward not in after_backward:
            after_backward.append(self._after_backward)

    def stop(self) -> None:
        self._before = {}
        if self._after_backward in after_backward:
            after_backward.remove(self._after_backward)

    def after_step(self) -> Callable[[], Edits] | None:
        """Stop looking. Does not wait for a device.

        Returns:
            A function that reads the edits from the device, which must have come here; None if
            there is nothing to read.
        """
        before = self._before
        now = _take(self._optimizer(), grad_of) if before else before
        self.stop()
        return functools.partial(_read, before, now) if before and now else None

    def _after_backward(self) -> None:
        self._num_backwards += 1
        if self._optimizer() is None or self._num_backwards > _MAX_BACKWARDS:
            self.stop()
        elif torch._C._current_graph_task_id() < 0:  # Else it is a checkpoint's, in a backward.
            self._before = _take(self._optimizer(), grad_of)


class WeightEdits:
    """What a program does to the weights of one optimizer between two of its steps."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._before: _Samples = {}
        """After the last step."""
        self._now: _Samples = {}
        """Before the next one."""

    def watch(self) -> None:
        """Look from here on until the next step."""
        self._before, self._now = _take(self._optimizer(), torch.Tensor.detach), {}

    def before_step(self) -> None:
        if self._before:
            self._now = _take(self._optimizer(), torch.Tensor.detach)

    def after_step(self) -> Callable[[], Edits] | None:
        """As that of `GradientEdits`. Factors only: a step of another optimizer may have added the
        same number to all elements."""
        before, now = self._before, self._now
        self._before = self._now = {}
        return functools.partial(_read_factors, before, now) if before and now else None


def _take(
    optimizer: torch.optim.Optimizer | None,
    of: Callable[[nn.Parameter], torch.Tensor | None],
) -> _Samples:
    samples: _Samples = {}
    for group in () if optimizer is None else optimizer.param_groups:
        for parameter in group["params"]:
            info = get_info(parameter)
            values = None if info is None else of(parameter)
            if info is None or values is None or not _is_readable(values):
                continue
            if not samples and _is_capturing(values.device):
                return samples  # They would be read before the graph has run.
            stride = max(1, values.numel() // _NUM_SAMPLES)
            samples[info.fqn] = values.detach()[::stride][:_NUM_SAMPLES].clone()
    return samples


def _is_readable(values: torch.Tensor) -> bool:
    is_plain = values.dim() == 1 and values.is_floating_point()
    return is_plain and values.numel() >= _MIN_SAMPLES


def _is_capturing(device: torch.device) -> bool:
    """Whether what is issued now is recorded in a graph instead of run."""
    ask = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    return ask is not None and bool(ask())


def _read(before: _Samples, now: _Samples, tolerance: float = _TOLERANCE) -> Edits:
    old, new, edits = _values(before), _values(now), {}
    for name, values in old.items():
        dtype = before[name].dtype
        if name in new and now[name].dtype == dtype and len(new[name]) == len(values):
            edit = fit(values, new[name], torch.finfo(dtype).eps, tolerance)
            if edit is not None:
                edits[name] = edit
    return edits


def _read_factors(before: _Samples, now: _Samples) -> Edits:
    edits = _read(before, now, _WEIGHTS_TOLERANCE)
    return {name: edit for name, edit in edits.items() if not edit.offset}


def _values(samples: _Samples) -> dict[str, list[float]]:
    """Read them, in one copy for each device and dtype: a copy may wait for what is queued."""
    alike: dict[tuple[torch.device, torch.dtype], list[str]] = {}
    for name, sample in samples.items():
        alike.setdefault((sample.device, sample.dtype), []).append(name)
    values = {}
    for names in alike.values():
        found = iter(torch.cat([samples[name] for name in names]).tolist())
        for name in names:
            values[name] = [*itertools.islice(found, samples[name].numel())]
    return values
