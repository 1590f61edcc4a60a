"""Follower: one pass that only some ranks of a join run; the others follow each collective of it.

Before each gather and each reduction, ranks exchange which one they want (`Meeting`). All take part
in the lowest wish: a rank that does not run the pass frees what it gathered at once, and brings to
a reduction what it has of earlier micro-batches, or zeros. Nothing is prefetched, and no order is
recorded, as ranks that only follow would not predict the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from layerzero.optional.meeting import NOTHING, Meeting
from layerzero.optional.reductions import counts_of, flags_of, scale_to
from layerzero.step.exec_order import ExecOrderRecorder, Order
from layerzero.step.reduction import Reduction
from layerzero.step.root import RootState
from layerzero.step.states import Hold, ShardState
from layerzero.step.unit import Unit
from layerzero.uneven.state import JoinState

_OF_A_STEP = int(Hold.LAST_OF_FORWARD | Hold.POLICY | Hold.FIRST_OF_FORWARD | Hold.EXPLICIT)


class Follower(ExecOrderRecorder):
    """What the scheduler and the reducer consult in such a pass."""

    is_open: bool
    """Whether ranks may still want something in the pass."""
    ahead: Sequence[Unit] = ()

    def __init__(
        self, root: RootState, meeting: Meeting, state: JoinState, optional: Any, runs: bool
    ) -> None:
        """
        Args:
            optional: the model's own optional units, or None.
            runs: whether this rank runs the pass.
        """
        super().__init__()
        self.is_open = True
        self._scheduler, self._reducer, self._context = root.scheduler, root.reducer, root.context
        self._units, self._meeting, self._state = root.units, meeting, state
        self._optional, self._runs = optional, runs
        self._taken: Unit | None = None
        """The unit that all ranks reduce now."""
        self._reduced: set[Unit] = set()

    # Gathers ----------------------------------------------------------------------------------

    def before_use(self, unit: Unit) -> None:
        if unit.state is ShardState.SHARDED and self.is_open:
            self._want(2 * unit.index)

    def after_use(self, unit: Unit) -> None:
        pass

    def prefetches_after(self, unit: Unit, in_backward: bool, is_post: bool) -> bool:
        return True  # Nothing is left to prefetch.

    def makes_graph(self, unit: Unit, grad_enabled: bool) -> bool:
        return grad_enabled

    def finish(self) -> None:
        """This rank wants nothing more: take part in what others want, until none does."""
        while (event := self._meeting.ask(NOTHING)) != NOTHING:
            self._take_part(event)
        self.is_open = False

    def _want(self, wish: int) -> None:
        while (event := self._meeting.ask(wish)) != wish:
            self._take_part(event)

    def _take_part(self, event: int) -> None:
        unit = self._units[event // 2]
        if event % 2:
            self._taken = unit
            self._reducer.reduce(unit)
            self._taken = None
            return
        # What this rank has resident is gathered again, for those where it is not.
        holds, shown = int(unit.holds), unit.shows_unsharded
        is_resident = unit.state is not ShardState.SHARDED
        in_backward = self._context.in_backward
        regathered = not self._reducer.requires_sync if in_backward else self._state.makes_graph
        unit.reshard(regathered)
        unit.unshard()
        unit.wait_for_unshard()
        unit.hold(holds)
        if not is_resident:
            unit.free(regathered_this_step=regathered)
        elif shown:
            unit.show_unsharded()

    def end_backward(self, orders: Iterable[Order]) -> None:
        if self._optional is not None:
            self._optional.schedule.end_backward(orders)
        for unit in self._units:
            if unit.is_held(_OF_A_STEP) and not unit.depth:
                unit.free(_OF_A_STEP)  # Only ranks that run it keep the first unit.

    def drop(self) -> None:
        self.is_open = False
        if self._optional is not None:
            self._optional.schedule.drop()

    # Reductions -------------------------------------------------------------------------------

    def concerns(self, unit: Unit) -> bool:
        return True

    def before_reduction(self, unit: Unit) -> bool:
        """Whether this rank reduces the unit now."""
        if not self._context.in_backward:
            return True
        if unit is self._taken:
            self._reduced.add(unit)
            return True
        sums_here = not self._reducer.requires_sync and not (
            self._reducer.sums_sharded and any(h.placement.sums_in_shards for h in unit.handles)
        )
        if sums_here:
            return True
        if self._runs:
            self._want(2 * unit.index + 1)
            self._reduced.add(unit)
        # Else `before_delivery` comes to what waits here.
        return self._runs

    def before_delivery(self) -> None:
        """Take part in the rest of a backward; then reduce what waits on any rank, of earlier
        micro-batches."""
        if not self._context.in_backward:
            return
        self.finish()
        if self._reducer.requires_sync:
            rest = [unit for unit in self._units if unit not in self._reduced]
            own = [any(h.gradients.is_waiting for h in unit.handles) for unit in rest]
            for unit, column in zip(rest, zip(*self._meeting.bits(own), strict=True), strict=True):
                if any(column):
                    self._take_part(2 * unit.index + 1)

    def commit(self) -> None:
        if self._optional is not None:
            self._optional.reductions.expect_sums()

    def exchange_presence(
        self, reductions: list[Reduction]
    ) -> Callable[[], list[tuple[Reduction, set[int]]]]:
        """As the reducer's; gradients become means over the ranks that have batches."""
        counts = counts_of(reductions, self._meeting.bits(flags_of(reductions)))

        def answer() -> list[tuple[Reduction, set[int]]]:
            answers = []
            for reduction in reductions:
                own = counts[id(reduction.handle)]
                if reduction.unit.index in self._state.participants:
                    scale_to(reduction, own, self._context)
                elif self._state.averages_active:
                    number = self._state.num_active
                    scale_to(reduction, {i: number for i, n in own.items() if n}, self._context)
                answers.append((reduction, {index for index, number in own.items() if number}))
            return answers

        return answer
