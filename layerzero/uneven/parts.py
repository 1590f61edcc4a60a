"""The objects of `optional/` inside a join: the exchange that ends a pass is one that ranks need
anyway.

Before a forward begins, all ranks know that it comes (`Negotiation`), so they follow the recorded
order of its gathers without an exchange. What a rank wants besides, the others learn in the
exchange before what they do next; until then the pass is *unsettled*. After a backward it is the
exchange in which ranks compare which gradients exist.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from layerzero.optional.agreement import GO_ON, Agreement
from layerzero.optional.reductions import AgreedReductions
from layerzero.optional.schedule import AgreedOrder, AgreedSchedule
from layerzero.step.exec_order import Order
from layerzero.step.reduction import Reduction
from layerzero.step.unit import Unit
from layerzero.uneven.requests import Request
from layerzero.uneven.state import JoinState


class Entry(NamedTuple):
    """What one rank brings to an exchange."""

    request: Request
    is_last: bool
    """Whether all ranks are out of batches, and this one was among the last."""
    event: int
    """What it wants in an unsettled forward, as in `Agreement`."""
    bits: list[bool]
    """What an `AgreedSchedule` compares of a forward."""
    gradient_states: list[int]
    """`JoinedOptimizers.gradient_states`"""
    options: list[int]
    """`JoinedOptimizers.options`"""


Bring = Callable[[int, Sequence[bool]], list[Entry]]
"""An exchange that takes this rank's event and bits."""


class JoinedAgreement(Agreement):
    """An `Agreement` with as few exchanges as a join can do with."""

    is_unsettled: bool
    """Whether this rank has ended a forward in which others may still want something."""
    bring_inside: Bring
    """Exchanges inside a forward."""
    exchanges_at_end: Callable[[], bool]
    """Whether the next collective after a backward is `exchange_at_end`."""

    def begin(self, *args: Any, **options: Any) -> None:
        # With `repeats`, ranks exchange at the end of every backward: a shadowing rank cannot know
        # what those that run it want.
        super().begin(*args, **{**options, "repeats": True})
        self._is_forward = self._exchanges
        self._follows = self._exchanges and self.places.is_known
        if self._follows:
            self._contract.extend(self.places.expected)

    def finish(self) -> None:
        self._expect()
        self._finish_contract()
        if self._follows:
            self.is_unsettled = True
        elif self._is_forward:
            super().finish()
        else:
            # Asked before each exchange: what all ranks have taken part in decides.
            while self.needed and not self.exchanges_at_end() and self._meet(GO_ON):
                self._finish_contract()

    def end(self, is_final: bool = True) -> None:
        if not self.is_unsettled:
            super().end(is_final)

    def abort(self) -> None:
        super().abort()
        self.is_unsettled = self._follows = self._is_forward = False
        self._entries: list[Entry] = []
        self._bring: Bring | None = None

    def report(self, error: BaseException) -> None:
        if self.is_open:
            self._expect()  # What the others take part in before they exchange.
        super().report(error)

    # An unsettled forward -------------------------------------------------------------------------

    def settle_with(self, bring: Bring) -> list[Entry] | None:
        """One exchange after an unsettled forward.

        Returns:
            What ranks brought; None: some wanted a gather, in which this rank took part.
        """
        self._bring = bring
        if self._meet(GO_ON):
            self._finish_contract()
            return None
        return self._entries

    def settled(self) -> None:
        """Every rank has ended the forward: learn from it."""
        self.is_unsettled = False
        self.end()

    def _say(self, wish: int) -> list[int]:
        if not self._follows:
            return super()._say(wish)
        bits = list(self._bits())
        self._entries = (self._bring or self.bring_inside)(wish, bits)
        self._answers = [entry.bits[: len(bits)] for entry in self._entries]
        return [entry.event for entry in self._entries]


class JoinedSchedule(AgreedSchedule):
    """Completes what it knows of a forward once every rank has ended it."""

    agreement: JoinedAgreement
    state: JoinState
    _was_reached: list[bool]
    """What `_reached` returned when the forward ended."""
    _unsettled: tuple[AgreedOrder, bool]

    def _is_training(self, unit: Unit) -> bool:
        return self.state.is_training

    def _reached(self) -> list[bool]:
        return self._was_reached if self.agreement.is_unsettled else super()._reached()

    def _keeps_last(self) -> tuple[bool, bool]:
        return False, False  # Ranks without batches gather no unit for a use of their own.

    def settle_forward(self) -> None:
        self._was_reached = super()._reached()
        super().settle_forward()

    def end(self, is_final: bool = True) -> Order:
        order = super().end(is_final)
        if self.agreement.is_unsettled:
            assert isinstance(order, AgreedOrder), "of a forward"
            self._unsettled = order, torch.is_grad_enabled()
        return order

    def settle_order(self) -> None:
        """Every rank has ended the forward: what `end` could not know of it."""
        order, grad_enabled = self._unsettled
        self._events = self.agreement.places.events
        self._note_needed(order, self.agreement.answers, grad_enabled)
        self.agreement.settled()


class JoinedReductions(AgreedReductions):
    """Gradients as means over the ranks that have batches."""

    state: JoinState

    def exchanges_at_end(self) -> bool:
        """Whether a delivery exchanges once the pass is over, and reduces nothing before that.

        The same on every rank that has taken part in the same events.
        """
        units = (self._units[index] for index in self._agreement.needed)
        has_rest = bool(self._waiting - self._reduced)
        syncs = self._reducer.requires_sync
        return syncs and not has_rest and any(unit.is_trainable for unit in units)

    def _scale(self, reduction: Reduction, counts: dict[int, int]) -> None:
        state = self.state
        if reduction.unit.index in state.participants:
            super()._scale(reduction, counts)
        elif state.averages_active:
            super()._scale(reduction, {i: state.num_active for i, count in counts.items() if count})
