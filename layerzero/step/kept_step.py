"""KeptStep: what the engine keeps of a step between its passes: sums, or that it is left out.

Features show it in `.grad`, and end it (optim/steps.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from layerzero.step.handle import FlatParamHandle
from layerzero.step.unit import Unit


class KeptStep:
    """State of a step that one model keeps: gradients that wait, or that the step is left out."""

    is_skipping = False
    """Whether gradients are dropped, until an optimizer's step or `zero_grad`."""
    adds_up = False
    """Whether earlier micro-batches wait; the same on every rank that runs the same passes."""
    waiting_units: Sequence[Unit] = ()
    """The units whose gradients wait."""

    def __init__(self, units: Sequence[Unit]) -> None:
        """`units` is the root's list."""
        self._units = units

    def end_pass(self, waiting: Sequence[Unit], was_dropped: bool) -> None:
        """The pass is complete. Gradients of `waiting` are not reduced by now, on any rank. If the
        others were dropped, the step is left out."""
        self.is_skipping |= was_dropped
        self.adds_up = bool(waiting)
        self.waiting_units = waiting

    def skip_no_more(self) -> None:
        """The step that was left out has ended."""
        self.is_skipping = False

    def forget_sums(self) -> None:
        """Drop the sums of earlier micro-batches."""
        for unit in self._units:
            for handle in unit.handles:
                handle.gradients.forget()
        self.adds_up = False
        self.waiting_units = ()


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
