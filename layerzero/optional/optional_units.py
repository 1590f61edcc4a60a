"""OptionalUnits: units that a rank may skip."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from layerzero.build.regions import OptionalRegions
from layerzero.optional.agreement import Agreement
from layerzero.optional.creation_times import CreationTimes
from layerzero.optional.exchange import Exchange
from layerzero.optional.reductions import AgreedReductions
from layerzero.optional.schedule import AgreedSchedule
from layerzero.step.calls import ForwardCall
from layerzero.step.extension import Extension
from layerzero.step.root import RootState
from layerzero.step.unit import Unit
from layerzero.watch.diagnosis import CollectiveError, PeerRaised

_next_number = torch._C._autograd._get_sequence_nr
"""The number that autograd gives to the next node of this thread."""


def exchange_of(root: RootState) -> Exchange:
    """An exchange between the ranks of a model. Collective where it makes new groups."""
    placement = next(h.placement for unit in root.units for h in unit.handles)
    on_device = root.streams.are_apart or root.device.type != "cpu"
    return Exchange(placement, root.operations, on_device)


class OptionalUnits(Extension):
    """Has the ranks of a model ask an `Agreement` before each collective."""

    region_of: Mapping[int, str]
    """Index of each optional unit, and the name of its region."""

    def __init__(self, root: RootState, regions: OptionalRegions, exchange: Exchange) -> None:
        """The units of `regions` are optional between `begin` and `end`, and no others."""
        units, scheduler, reducer = root.units, root.scheduler, root.reducer
        self._units = units
        self.region_of = regions.region_of
        self._context = root.context
        self._backward = root.backward
        self._times = CreationTimes()

        # Not bound to this object: a cycle would keep the model until a collection.
        def take_part(event: int) -> None:
            agreed = reducer.agreed if event % 2 else scheduler.agreed
            agreed.take_part(units[event // 2])

        self.agreement = Agreement(
            exchange,
            regions.region_of,
            label_of=lambda index: units[index].label,
            take_part=take_part,
            before_event=lambda: scheduler.agreed.before_event(),
        )
        self.reductions = AgreedReductions(root, regions, self.agreement)
        self.schedule = AgreedSchedule(root, regions, self.agreement, self.reductions)

    def begin(self, root: RootState) -> None:
        """From now on. Between passes."""
        root.optional = self
        root.extensions.add(self)
        root.scheduler.agree(self.schedule)
        root.reducer.agreed = self.reductions
        for unit in self._units:
            unit.set_optional(unit.index in self.region_of)
        self.reductions.expect_sums()

    def end(self, root: RootState) -> None:
        root.optional = None
        root.extensions.remove(self)
        root.scheduler.agree(None)
        root.reducer.agreed = None
        for unit in self._units:
            unit.set_optional(False)

    def enter_call(self, unit: Unit, start: int) -> None:
        if not self._context.in_backward:
            self._times.note(_next_number(), start)
        elif (node := torch._C._current_autograd_node()) is not None:
            # A recomputation comes before the gradient of any output of the region, at a point
            # that depends on the region's last operation. The required units that are done by then
            # are reduced first, as on ranks that recompute nothing.
            time = self._times.before(node._sequence_nr())
            if time is not None:
                self._backward.finish_begun_after(time)

    def exit_call(self, call: ForwardCall, outputs: object, is_outermost: bool) -> None:
        if self._context.in_backward:
            return
        if call.unit.is_optional:
            self.schedule.note_call(call, outputs)
        if is_outermost:
            self.schedule.settle_forward()

    def before_abort(self, error: BaseException | None) -> None:
        """Raise on ranks that wait in the agreement, too, unless they raise at the same place."""
        is_own = error is None or (
            isinstance(error, Exception) and not isinstance(error, (PeerRaised, CollectiveError))
        )
        # After an interrupt the others may be gone.
        if is_own and not self._context.operations.has_failed:
            self.agreement.report(error or RuntimeError("a backward pass failed"))
