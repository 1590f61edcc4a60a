"""JoinedReducer: gradients as means over the ranks that have batches."""

from __future__ import annotations

from layerzero.optional.reducer import OptionalReducer
from layerzero.step.reduction import Reduction
from layerzero.uneven.seat import Seat


class JoinedReducer(OptionalReducer):
    def sit(self, seat: Seat) -> None:
        self._seat = seat
        self.averages_participants = True  # So that `_scale` is called.

    def exchanges_at_end(self) -> bool:
        """Whether `deliver` exchanges once the pass is over, and reduces nothing before that.

        The same on every rank that has taken part in the same events.
        """
        units = (self._units[index] for index in self._agreement.needed)
        has_rest = bool(self._waiting - self._reduced)
        return self.requires_sync and not has_rest and any(unit.is_trainable for unit in units)

    def _scale(self, reduction: Reduction, counts: dict[int, int]) -> None:
        seat = self._seat
        if reduction.unit.index in seat.participants:
            super()._scale(reduction, counts)
        elif seat.averages_active:
            super()._scale(reduction, {i: seat.num_active for i, count in counts.items() if count})
