"""JoinedScheduler: completes what it knows of a forward once every rank has ended it."""

from __future__ import annotations

from layerzero.optional.scheduler import AgreedOrder, OptionalScheduler
from layerzero.step.exec_order import Order
from layerzero.step.unit import Unit
from layerzero.uneven.agreement import JoinedAgreement
from layerzero.uneven.seat import Seat


class JoinedScheduler(OptionalScheduler):
    """An `OptionalScheduler` of a model inside a join."""

    agreement: JoinedAgreement

    def sit(self, seat: Seat) -> None:
        self._seat = seat
        self._was_reached: list[bool] = []
        """What `_reached` returned when the forward ended."""
        self._unsettled: tuple[AgreedOrder, bool] | None = None

    def _is_training(self, unit: Unit) -> bool:
        return self._seat.is_training

    def _reached(self) -> list[bool]:
        return self._was_reached if self.agreement.is_unsettled else super()._reached()

    def _keeps_last(self) -> tuple[bool, bool]:
        return False, False  # Ranks without batches gather no unit for a use of their own.

    def settle_forward(self) -> None:
        self._was_reached = super()._reached()
        super().settle_forward()

    def end_forward(self, grad_enabled: bool) -> Order:
        order = super().end_forward(grad_enabled)
        assert isinstance(order, AgreedOrder), "of an OptionalScheduler"
        if self.agreement.is_unsettled:
            self._unsettled = order, grad_enabled
        return order

    def settle_order(self) -> None:
        """Every rank has ended the forward: what `end_forward` could not know of it."""
        assert self._unsettled is not None, "a forward is unsettled"
        (order, grad_enabled), self._unsettled = self._unsettled, None
        agreement = self.agreement
        reached = [any(bits) for bits in zip(*agreement.answers, strict=True)]
        needed = [u.index for u, bit in zip(self._optional, reached, strict=False) if bit]
        order.key = agreement.events, tuple(sorted(needed))
        order.needed = frozenset(needed if grad_enabled else ())
        if order.needed:
            self._open.append(order)
        agreement.settled()
