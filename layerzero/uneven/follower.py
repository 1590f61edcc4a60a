"""Follower: one pass that only some ranks of a join run; the others follow each collective of it.

Before each gather and each reduction, ranks exchange which one they want (`Agreement`). All take
part in the lowest request: a rank that does not run the pass frees what it gathered at once, and
brings to a reduction what it has of earlier micro-batches, or zeros. Nothing is prefetched, and no
order is recorded, as ranks that only follow would not predict the same.
"""

from __future__ import annotations

from collections.abc import Mapping

from layerzero.optional.agreement import Agreement
from layerzero.optional.exchange import NOTHING
from layerzero.optional.optional_units import gather_with_others
from layerzero.step.reduction import Reduction
from layerzero.step.root import RootState
from layerzero.step.unit import ShardState, Unit


class Follower(Agreement):
    """What the scheduler and the reducer consult in such a pass."""

    prefetches = False
    subject = "a pass inside a join"

    def __init__(self, root: RootState, runs: bool, num_averaged: int | None) -> None:
        """`runs`: whether this rank runs the pass. `num_averaged`: over so many ranks gradients are
        means; None: over all."""
        super().__init__(root)
        self._runs, self._num_averaged = runs, num_averaged
        self._reduced: set[Unit] = set()
        participate = root.optional is not None and root.optional.mean == "participants"
        self._of_participants: Mapping[int, str] = root.optional.region_of if participate else {}
        """Units, by index, whose gradients are means over the ranks that had one."""

    def before_use(self, unit: Unit) -> None:
        if unit.state is ShardState.SHARDED or (unit.is_stale and not self._context.in_backward):
            self._request(2 * unit.index)
            self._take_part(2 * unit.index, is_used=True)

    def finish(self) -> None:
        """This rank wants nothing more: take part in what others want, until none does."""
        self._request(NOTHING)

    def _take_part(self, request: int, is_used: bool = False) -> None:
        unit = self._units[request // 2]
        if request % 2:
            self.take(unit)
            return
        for handle in unit.handles:
            handle.drop_post_forward_shard()  # Which ranks kept one may differ.
        gather_with_others(unit, is_used)

    def scale(self, reduction: Reduction, counts: dict[int, int]) -> None:
        if reduction.unit.index in self._of_participants:
            self.scale_to(reduction, counts)
        elif self._num_averaged is not None:
            present = [index for index, count in counts.items() if count]
            self.scale_to(reduction, dict.fromkeys(present, self._num_averaged))

    def before_reduction(self, unit: Unit) -> bool:
        if not self._context.in_backward or not self.sends(unit):
            return True
        if unit is not self._taken:
            if not self._runs:
                return False  # `reduce_the_rest` comes to what waits here.
            self._request(2 * unit.index + 1)
        self._reduced.add(unit)
        return True

    def reduce_the_rest(self) -> None:
        """Take part in the rest of a backward; then reduce what waits on any rank, of earlier
        micro-batches."""
        if self._context.in_backward:
            self.finish()
        if self._reducer.requires_sync:
            units = [unit for unit in self._units if unit.is_trainable]
            self.settle(units, self._reduced if self._context.in_backward else units)

    def commit(self) -> None:
        pass
