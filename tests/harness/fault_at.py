"""FaultAt raises at the n-th operation; `snapshot` is what a failed pass must not change."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from layerzero import ZeRO3
from tests.harness.internals import FinishingStream, InlineStream, Waitable, root_state

_start_after = FinishingStream.start_after


class FaultAt(TorchDispatchMode):
    """Runs out of memory before operation number `at` of this thread, counted from 1, or before the
    first one of the name `at`.

    Messages do not count: what fails in one is a failed collective.

    On gloo a gather behind a reduction begins here if that has ended, else on another thread, whose
    operations do not count. So that the n-th operation is the same one on every rank, it always
    begins here if `at` is even, and always there if it is odd.
    """

    def __init__(self, at: int | str) -> None:
        super().__init__()
        self.count = 0
        self._at = at
        self._starts: Any = None

    def __enter__(self) -> FaultAt:
        if isinstance(self._at, int) and self._at > 0:
            start = _start_there if self._at % 2 else _start_here
            self._starts = mock.patch.object(FinishingStream, "start_after", start)
            self._starts.start()
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        if self._starts is not None:
            self._starts.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "c10d" not in func.namespace
        if self._at in (self.count, str(func)) and "c10d" not in func.namespace:
            raise torch.OutOfMemoryError(f"at operation {self._at} ({func})")
        return func(*args, **(kwargs or {}))


def _start_here(
    stream: FinishingStream, first: Waitable | None, issue: Callable[[], Waitable]
) -> Waitable:
    if first is None and stream._last is not None:
        stream._last.wait_until_idle()
    return _start_after(stream, first, issue)


def _start_there(
    stream: FinishingStream, first: Waitable | None, issue: Callable[[], Waitable]
) -> Waitable:
    return stream._enqueue(partial(InlineStream.start_after, stream, first, issue))


def snapshot(model: ZeRO3, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Copies of parameters, `.grad`, optimizer state and sums of micro-batches, and open calls."""
    root = root_state(model)
    found: list[Any] = [_copy(each) for each in model.parameters()]
    # Zeros stand for None while the engine keeps something of a step (optim/steps.py).
    gradients = (
        p.grad if p.grad is not None and p.grad.any() else None for p in model.parameters()
    )
    found += map(_copy, gradients)
    for parameter in model.parameters():
        found += [(key, _copy(value)) for key, value in optimizer.state.get(parameter, {}).items()]
    found.append(_open_calls(model))
    found.append(root.reducer.kept.adds_up)
    for handle in (handle for unit in root.units for handle in unit.handles):
        sums = handle.gradients
        found.append((sums.holds_sum, set(sums.present)))
        found += [_copy(each) for each in (sums.shard_sum, sums.host_sum)]
        if sums.holds_sum:
            found.append(_copy(sums.sum))
    return found


def _open_calls(model: ZeRO3) -> dict[Any, Any]:
    """Calls whose backward may come; with optional modules also where these came."""
    root = root_state(model)
    found: dict[Any, Any] = {"calls": [len(unit.open_starts) for unit in root.units]}
    if root.optional is not None:
        places = copy.deepcopy(root.optional.places)
        places.begin(None)  # Learns from the latest forward, unless that was taken back.
        # The kind of a forward that failed may stay, without a path.
        found["places"] = {kind: paths for kind, paths in places._paths.items() if paths}
    return found


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def differences(before: list[Any], after: list[Any]) -> list[int]:
    """Positions at which two snapshots differ in any bit."""
    if len(before) != len(after):
        return [min(len(before), len(after))]
    return [i for i, pair in enumerate(zip(before, after, strict=True)) if not _same(*pair)]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        return all(map(_same, one, other))
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return bool(one is None and other is None) or bool(one == other)
    same_kind = one.dtype == other.dtype and one.shape == other.shape
    return same_kind and torch.equal(
        one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8)
    )
