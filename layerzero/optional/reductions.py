"""AgreedReductions: has a reducer reduce units in the order that ranks agree on."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from layerzero.build.regions import OptionalRegions
from layerzero.optional.agreement import Agreement
from layerzero.step.context import RuntimeContext
from layerzero.step.reduction import Reduction
from layerzero.step.root import RootState
from layerzero.step.states import TrainingState
from layerzero.step.unit import Unit


class AgreedReductions:
    """Decides with other ranks what a reducer reduces, and when."""

    def __init__(self, root: RootState, regions: OptionalRegions, agreement: Agreement) -> None:
        self._reducer, self._scheduler = root.reducer, root.scheduler
        self._context, self._units = root.context, root.units
        self._agreement = agreement
        self._placement = next(h.placement for unit in root.units for h in unit.handles)
        self.averages_participants = regions.mean == "participants"
        self._agreed: Unit | None = None
        """The unit that all ranks have agreed to reduce now."""
        self._late: list[Unit] = []
        """Units whose gradients came where no rank could take part."""
        self._reduced: set[int] = set()
        """Optional units reduced in this backward."""
        self._waiting: set[int] = set()
        """Optional units that may hold sums of micro-batches on any rank."""
        self._waits_next: set[int] = set()
        """What that is once the pass is complete."""

    def expect_sums(self) -> None:
        """Any rank may hold sums of micro-batches of any optional unit, if there are any."""
        optional = {unit.index for unit in self._units if unit.is_optional}
        self._waiting = optional if self._reducer.adds_up else set()
        self._waits_next = self._waiting

    def how(self) -> tuple[bool, bool]:
        """How gradients of the coming backward are reduced: its collectives depend on it."""
        return self._reducer.requires_sync, self._reducer.sums_sharded

    def _sends(self, unit: Unit) -> bool:
        """Whether reducing the unit now is collective, rather than a sum on this rank."""
        return self._reducer.requires_sync or (
            self._reducer.sums_sharded and any(h.placement.sums_in_shards for h in unit.handles)
        )

    def concerns(self, unit: Unit) -> bool:
        """Whether ranks agree on which of its gradients exist."""
        return unit.is_optional

    def before_reduction(self, unit: Unit) -> bool:
        """Whether this rank reduces the unit now."""
        agreement, event = self._agreement, 2 * unit.index + 1
        if unit is self._agreed or not (self._context.in_backward and agreement.is_open):
            return True
        if not unit.is_optional:
            if self._sends(unit):
                agreement.required(event)
                self._scheduler.agreed.before_reduction(unit)
            return True
        if unit.training_state is not TrainingState.BACKWARD:
            # Not reached by this backward. A delivery reduces it where any rank may need that.
            return False
        if not self._sends(unit):
            return True
        if agreement.want(event):
            self._scheduler.agreed.before_reduction(unit)
            self._reduced.add(unit.index)
            return True
        self._late.append(unit)
        return False

    def _reduce(self, unit: Unit) -> None:
        self._scheduler.agreed.before_reduction(unit)
        self._reduced.add(unit.index)
        self._agreed = unit
        try:
            self._reducer.reduce(unit)
        finally:
            self._agreed = None

    def take_part(self, unit: Unit) -> None:
        """Take part in a reduction that this rank has no gradients for, or not all of them yet."""
        self._reduce(unit)
        self._scheduler.agreed.free_after_reduction(unit)

    def before_delivery(self) -> None:
        """Settle what ranks have left to reduce in the pass that ends."""
        agreement = self._agreement
        if self._context.in_backward and agreement.is_open:
            agreement.finish()
            needed = {i for i in agreement.needed if self._units[i].is_trainable}
            if self._reducer.requires_sync:
                for index in sorted(self._waiting - self._reduced):
                    self._reduce(self._units[index])
            is_reduced = any(each.unit.is_optional for each in self._agreed_reductions())
            if is_reduced or any(self._sends(self._units[i]) for i in needed):
                for unit in self._late:
                    if unit.index not in self._reduced or self._has_gradients(unit):
                        agreement.want(2 * unit.index + 1, at_end=True)
                        self._reduce(unit)
                agreement.exchange_at_end()
            self._waits_next = set() if self._reducer.requires_sync else self._waiting | needed
            self._late, self._reduced = [], set()

    def commit(self) -> None:
        self._waiting = self._waits_next

    @staticmethod
    def _has_gradients(unit: Unit) -> bool:
        return any(p.grad is not None for h in unit.handles for p in h.unsharded_params)

    def drop(self) -> None:
        self._late, self._reduced, self._waits_next = [], set(), self._waiting

    # Which gradients exist --------------------------------------------------------------------

    def _agreed_reductions(self) -> list[Reduction]:
        """Those of the pass about which ranks exchange with the rest: of optional units, and where
        all ranks of the exchange share a required one, of that."""
        return [each for each in self._reducer.undelivered() if self._is_agreed(each)]

    def _is_agreed(self, reduction: Reduction) -> bool:
        return reduction.unit.is_optional or reduction.handle.placement is self._placement

    def presence(self) -> list[bool]:
        """For each parameter of `_agreed_reductions`, in order of issue: whether this rank had a
        gradient."""
        return flags_of(self._agreed_reductions())

    def exchange_presence(
        self, reductions: list[Reduction]
    ) -> Callable[[], list[tuple[Reduction, set[int]]]]:
        """As the reducer's, where some of the units are optional."""
        agreed = [each for each in reductions if self._is_agreed(each)]
        rest = [each for each in reductions if not self._is_agreed(each)]
        others = self._reducer.exchange_presence(rest) if rest else list
        flags = flags_of(agreed)
        table = self._agreement.answers
        if not (table and len(table[0]) == len(flags)):
            table = self._agreement.gather(flags)
        counts = counts_of(agreed, table)

        def answer() -> list[tuple[Reduction, set[int]]]:
            found = {id(reduction): present for reduction, present in others()}
            for reduction in agreed:
                own = counts[id(reduction.handle)]
                found[id(reduction)] = {index for index, count in own.items() if count}
                if self.averages_participants and reduction.unit.is_optional:
                    scale_to(reduction, own, self._context)
            return [(reduction, found[id(reduction)]) for reduction in reductions]

        return answer


def scale_to(reduction: Reduction, counts: dict[int, int], context: RuntimeContext) -> None:
    """Turn a mean over all ranks into one over so many, for each parameter."""
    if reduction.unit.options.gradient_scale == 1.0 or reduction.chunk is None:
        return  # A sum; or one rank alone.
    number = reduction.handle.placement.num_averaged
    context.streams.wait_on_host(reduction.landed)
    reduction.handle.gradients.scale_parts_(
        reduction.chunk, {i: number / c for i, c in counts.items() if c not in (0, number)}
    )


def flags_of(reductions: Iterable[Reduction]) -> list[bool]:
    """For each parameter of the reductions: whether this rank had a gradient."""
    return [
        index in reduction.present
        for reduction in reductions
        for index in reduction.handle.gradients.layout.trainable
    ]


def counts_of(reductions: list[Reduction], table: list[list[bool]]) -> dict[int, dict[int, int]]:
    """For each flat parameter (by id) and parameter of it: how many ranks had a gradient.

    A unit may be reduced twice in a pass; a rank counts once.
    """
    keys = [
        (id(reduction.handle), index)
        for reduction in reductions
        for index in reduction.handle.gradients.layout.trainable
    ]
    places: dict[tuple[int, int], list[int]] = {}
    for place, key in enumerate(keys):
        places.setdefault(key, []).append(place)
    sums = [sum(column) for column in zip(*table, strict=True)]
    counts: dict[int, dict[int, int]] = {}
    for (handle, index), found in places.items():
        if len(found) == 1:
            ranks = sums[found[0]]
        else:
            ranks = sum([any([row[place] for place in found]) for row in table])
        counts.setdefault(handle, {})[index] = ranks
    return counts
