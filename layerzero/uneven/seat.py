"""Seat: what one join keeps of this rank, and knows of the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from layerzero.step.calls import ForwardPass
from layerzero.step.exec_order import Order
from layerzero.uneven.optimizers import JoinedOptimizers
from layerzero.uneven.scalers import JoinedScalers

_MAX_FORWARDS = 64
"""Forwards without a backward that are remembered."""


class Seat:
    """What one join keeps of this rank, and knows of the others."""

    num_active: int
    """Ranks that were not out at the last exchange."""
    is_shadowing: bool
    """Whether this rank takes part in what others run."""
    participants: frozenset[int]
    """Units whose gradients are means over the ranks that had one."""
    all_know: bool
    """Whether every rank knows of the error that ends the join."""

    def __init__(
        self,
        notify: Callable[[], Any],
        is_enabled: Callable[[], bool],
        optimizers: JoinedOptimizers,
        scalers: JoinedScalers,
        averages_active: bool,
        throws: bool,
    ) -> None:
        """
        Args:
            notify: called before each exchange while this rank is not out; in torch's Join its
                `notify_join_context`.
            is_enabled: whether torch's Join around the loop is on.
            averages_active: whether gradients are means over the ranks that are not out.
            throws: whether to raise on all ranks once some are out.
        """
        self.throws = throws
        self.notify = notify
        self.is_enabled = is_enabled
        self.optimizers = optimizers
        self.scalers = scalers
        self.averages_active = averages_active
        self.participants = frozenset[int]()
        self._hook: Callable[[], object] = lambda: self
        self.num_active = self.num_ranks = 0
        self.is_shadowing = self.all_know = False
        self.num_forwards = 0
        self.forwards: dict[int, ForwardPass] = {}
        self.is_training = False
        """Of the open forward."""

    def opened_by(self, hook: Callable[[], object]) -> None:
        """`hook`: weak reference to what torch's Join holds as long as it lives."""
        self._hook = hook

    def is_abandoned(self) -> bool:
        """Whether an error ended torch's Join, which does not report that."""
        return self._hook() is None

    def is_open(self) -> bool:
        return not (self.is_abandoned() or self.all_know)

    def average_participants(self, units: Iterable[int]) -> None:
        self.participants = frozenset(units)

    def begin_forward(self, is_training: bool) -> None:
        self.num_forwards += 1
        self.is_training = is_training

    def keep(self, forward_pass: ForwardPass) -> None:
        """Remember the forward that has begun, under its number."""
        self.forwards[self.num_forwards] = forward_pass
        self.forwards.pop(self.num_forwards - _MAX_FORWARDS, None)

    def number_of(self, order: Order) -> int:
        """The number of the forward that had this order; -1: one from outside the join."""
        found = (n for n, each in self.forwards.items() if each.order is order)
        return next(found, -1)

    def count(self, num_active: int, num_ranks: int) -> None:
        self.num_active, self.num_ranks = num_active, num_ranks

    def set_shadowing(self, is_shadowing: bool) -> None:
        self.is_shadowing = is_shadowing

    def all_know_of_error(self) -> None:
        self.all_know = True
