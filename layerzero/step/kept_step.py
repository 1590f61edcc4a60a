"""KeptStep: what the engine keeps of a step, and `.grad` meanwhile: sums, or that it is left out.

Gradients of micro-batches that wait (`no_sync`) have a stand-in (optim/waiting_gradients.py). After
a step that `on_nonfinite="skip"` leaves out, zeros stand there: later backwards of that step are
dropped, too, until the program clears its gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from layerzero.comm.streams import Streams
from layerzero.step.handle import FlatParamHandle
from layerzero.step.unit import Unit


class KeptStep:
    """State of a step that one model keeps: gradients that wait, or that the step is left out."""

    is_skipping = False
    """Whether gradients are dropped, until an optimizer's step or `zero_grad`."""
    adds_up = False
    """Whether earlier micro-batches wait; the same on every rank that runs the same passes."""
    make_stand_in: Callable[..., Any] | None = None
    """Makes what `.grad` shows of the sum of a sharded parameter, from that, the `GradientSums`,
    its index there, and the streams; None: `.grad` shows nothing."""
    _waiting_units: Sequence[Unit] = ()
    _is_stepping = False
    """Whether an optimizer steps, for which it was hidden."""

    def __init__(self, units: Sequence[Unit], streams: Streams) -> None:
        """`units` is the root's list."""
        self._units = units
        self._streams = streams
        self._placed: list[tuple[nn.Parameter, torch.Tensor, torch.Tensor | None]] = []
        """Parameters with the `.grad` that each shows, and the one before."""
        self._waiting: dict[nn.Parameter, Any] = {}

    @property
    def is_any(self) -> bool:
        """Whether the step is left out, or earlier micro-batches wait."""
        return self.is_skipping or bool(self._placed) or self._is_stepping

    def end_pass(self, waiting: Sequence[Unit], was_dropped: bool) -> None:
        """The pass is complete. Gradients of `waiting` are not reduced by now, on any rank. If the
        others were dropped, the step is left out."""
        self.is_skipping |= was_dropped
        self.adds_up = bool(waiting)
        self._waiting_units = waiting

    def show(self) -> None:
        """Show in `.grad` what is kept of the step: also of one that failed, which may go on."""
        if self._placed:
            return
        if self.is_skipping:
            for sharded in (p for unit in self._units for p in unit.sharded_params):
                if sharded.requires_grad:
                    before = sharded.grad
                    self._put(sharded, torch.zeros_like(sharded) if before is None else before)
        elif self.adds_up and self.make_stand_in is not None:
            for handle in (handle for unit in self._waiting_units for handle in unit.handles):
                for index in handle.gradients.trainable:
                    sharded = handle.sharded_params[index]
                    if sharded not in self._waiting:
                        self._waiting[sharded] = self.make_stand_in(
                            sharded, handle.gradients, index, self._streams
                        )
                    self._put(sharded, self._waiting[sharded].stand_before(sharded.grad))

    def _put(self, parameter: nn.Parameter, shown: torch.Tensor) -> None:
        self._placed.append((parameter, shown, parameter.grad))
        parameter.grad = shown

    def hide(self) -> bool:
        """Remove what it shows, so that `.grad` is what was reduced; returns whether it did."""
        placed, self._placed = self._placed, []
        for parameter, shown, before in placed:
            if parameter.grad is shown:
                waits = self._waiting.get(parameter) is shown
                parameter.grad = self._waiting[parameter].before if waits else before
        return bool(placed)

    def follow_zero_grad(self) -> None:
        """Give the step up if the program has cleared all sums, or any gradient of a step that is
        left out; else drop the sums of parameters that it has cleared. Not amid a pass."""
        shown = [each for each in self._placed if each[0].grad is each[1]]
        if len(shown) < len(self._placed) and (self.is_skipping or not shown):
            return self.give_up()
        for parameter, waiting, _ in self._placed:
            if parameter.grad is not waiting:
                self._waiting[parameter].drop()
        self._placed = shown

    def give_up(self) -> None:
        """The program begins another step: drop what is kept of this one."""
        self.forget_sums()  # First: then there is nothing to clear parameter by parameter.
        self.hide()
        self._is_stepping = self.is_skipping = False

    def forget_sums(self) -> None:
        """Drop the sums of earlier micro-batches."""
        for unit in self._units:
            for handle in unit.handles:
                handle.gradients.forget()
        self.adds_up = False
        self._waiting_units = ()

    def before_step(self) -> None:
        """An optimizer steps, and must not take what is kept for gradients."""
        self.follow_zero_grad()
        self._is_stepping = self.hide()

    def after_step(self) -> None:
        self._is_stepping = self.is_skipping = False
        self.show()


def whole_sums_fit(handles: Iterable[FlatParamHandle], room: int | None) -> bool:
    """Whether a rank may keep the whole sums of micro-batches, which send less than shards of them.

    The same on every rank.

    Args:
        room: bytes that they may take more than shards; None: as many as the rank keeps anyway, in
            main and compute shards, `.grad` and two moments.
    """
    more = kept = 0
    for handle in handles:
        gradients, main_nbytes = handle.gradients, handle.main_shard.nbytes
        kept += main_nbytes + (handle.compute_shard.nbytes if handle.has_compute_shard else 0)
        if gradients.trainable and handle.placement.sums_in_shards:
            kept += 3 * main_nbytes
            more += gradients.sum_nbytes
            more -= gradients.sum_nbytes // handle.placement.reduce_groups[0].size
    return more <= (kept if room is None else room)
