"""Several units' reductions in flight at once, bounded by bytes (`ReductionPolicy.in_flight`).

Beside backward a reduction then has more than the next unit's backward to travel in, for the price
of the gradients that it reads, which stay allocated meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence

from layerzero.config import Accumulation, ReductionPolicy, parse_nbytes
from layerzero.step.context import RuntimeContext
from layerzero.step.reducer import GradientReducer
from layerzero.step.unit import Unit


class SeveralInFlight(GradientReducer):
    """Waits for the oldest reductions only, and only for as many as the bound demands."""

    def __init__(
        self,
        context: RuntimeContext,
        units: Sequence[Unit],
        accumulation: Accumulation,
        max_nbytes: int,
    ) -> None:
        super().__init__(context, units, accumulation)
        self._max_nbytes = max_nbytes

    def _make_room(self, unit: Unit) -> None:
        needed = sum(handle.gradients.in_flight_nbytes for handle in unit.handles)
        while self._in_flight and not self._fits(unit, needed):
            self._complete_oldest()

    def _fits(self, unit: Unit, needed: int) -> bool:
        # A unit's gradients have one buffer. It may be reduced twice in a pass (reentrant
        # checkpoints), and then the first reduction still reads it.
        held = [reduction.handle.gradients.in_flight_nbytes for reduction in self._in_flight]
        is_free = all(reduction.unit is not unit for reduction in self._in_flight)
        return is_free and sum(held) + needed <= self._max_nbytes


def make_reducer(
    context: RuntimeContext,
    units: Sequence[Unit],
    policy: ReductionPolicy,
    single: type[GradientReducer] = GradientReducer,
    several: type[SeveralInFlight] = SeveralInFlight,
) -> GradientReducer:
    """The reducer that `policy` asks for: a `single` or a `several`."""
    if policy.in_flight is None:
        return single(context, units, policy.accumulation)
    return several(context, units, policy.accumulation, parse_nbytes(policy.in_flight))
