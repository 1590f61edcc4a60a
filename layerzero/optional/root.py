"""OptionalRoot: the state of a model of which ranks may skip optional units."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from layerzero.build.regions import OptionalRegions
from layerzero.optional.agreement import Agreement
from layerzero.optional.creation_times import CreationTimes
from layerzero.optional.exchange import Exchange
from layerzero.optional.reducer import OptionalReducer
from layerzero.optional.scheduler import OptionalScheduler
from layerzero.step.calls import ForwardCall
from layerzero.step.operations import remembers_failure
from layerzero.step.root import RootState
from layerzero.step.unit import Unit
from layerzero.watch.diagnosis import CollectiveError, PeerRaised

_next_number = torch._C._autograd._get_sequence_nr
"""The number that autograd gives to the next node of this thread."""


class OptionalRoot(RootState):
    """A `RootState` whose scheduler and reducer ask an `Agreement` before each collective."""

    scheduler: OptionalScheduler
    reducer: OptionalReducer
    _scheduler_class = OptionalScheduler
    _reducer_class = OptionalReducer

    def __init__(
        self, units: Sequence[Unit], *args: Any, regions: OptionalRegions, **kwargs: Any
    ) -> None:
        """Takes the arguments of `RootState`. Collective where the exchange makes new groups."""
        super().__init__(units, *args, **kwargs)
        self.agreement = self._agree_on(regions, self._make_exchange())

    def _make_exchange(self) -> Exchange:
        """An exchange between the ranks of the model. Collective where it makes new groups."""
        placement = next(h.placement for unit in self.units for h in unit.handles)
        on_device = self.streams.are_apart or self.device.type != "cpu"
        return Exchange(placement, self.operations, on_device)

    def _agree_on(
        self, regions: OptionalRegions, exchange: Exchange, make: type[Agreement] = Agreement
    ) -> Agreement:
        """An agreement on the units of `regions`, which alone are optional from now on."""
        units, scheduler, reducer = self.units, self.scheduler, self.reducer
        self._times = CreationTimes()
        for unit in units:
            unit.set_optional(unit.index in regions.region_of)

        def take_part(event: int) -> None:
            unit = units[event // 2]
            if event % 2:
                reducer.take_part(unit)
            else:
                scheduler.take_part_in_gather(unit)

        agreement = make(
            exchange,
            regions.region_of.keys(),
            regions.region_of,
            label_of=lambda index: units[index].label,
            take_part=take_part,
            before_event=scheduler.before_event,
        )
        optional = [unit for unit in units if unit.is_optional]
        scheduler.join(agreement, optional, regions.is_reused, reducer.how, reducer.presence)
        reducer.join(agreement, regions, scheduler.before_reduction, scheduler.free_after_reduction)
        return agreement

    @remembers_failure
    def begin_call(self, unit: Unit) -> ForwardCall:
        if self.context.in_backward:
            # A recomputation comes before the gradient of any output of the region, at a point
            # that depends on the region's last operation. The required units that are done by then
            # are reduced first, as on ranks that recompute nothing.
            if (node := torch._C._current_autograd_node()) is not None:
                time = self._times.before(node._sequence_nr())
                if time is not None:
                    self.backward.finish_begun_after(time)
            return super().begin_call(unit)
        number = _next_number()
        call = super().begin_call(unit)
        self._times.note(number, call.start)
        return call

    @remembers_failure
    def end_call(self, call: ForwardCall, outputs: object) -> None:
        if call.unit.is_optional and not self.context.in_backward:
            self.scheduler.note_call(call, outputs)
        try:
            if self._call_depth == 1 and not self.context.in_backward:
                self.scheduler.settle_forward()
            super().end_call(call, outputs)
        except BaseException as error:
            # Another rank raised: see `Agreement.report`.
            self.abort(error)
            raise

    def abort(self, error: BaseException | None = None) -> None:
        """Also raises on ranks that wait in the agreement, unless they raise at the same place."""
        is_own = error is None or (
            isinstance(error, Exception) and not isinstance(error, (PeerRaised, CollectiveError))
        )
        if is_own and not self.operations.has_failed:  # After an interrupt the others may be gone.
            self.agreement.report(error or RuntimeError("a backward pass failed"))
        super().abort(error)
