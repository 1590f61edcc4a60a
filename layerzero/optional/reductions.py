"""AgreedReductions: reductions that not every rank has gradients for."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence

from layerzero.optional.exchange import Exchange
from layerzero.step.handle import FlatParamHandle
from layerzero.step.reduction import Reduction
from layerzero.step.root import RootState
from layerzero.step.unit import Unit


class AgreedReductions:
    """Decides with other ranks what a reducer reduces.

    A subclass also has `before_reduction(unit)`, whether this rank reduces the unit now;
    `reduce_the_rest()`, when a pass ends; and `commit()`, once its gradients are delivered.
    """

    def __init__(self, root: RootState, exchange: Exchange) -> None:
        self._reducer, self._context, self._units = root.reducer, root.context, root.units
        self._exchange = exchange
        self._taken: Unit | None = None
        """The unit that all ranks reduce now."""
        self._counts: dict[int, dict[int, int]] = {}
        """Flat parameter (by id) and index of a parameter -> number of ranks with a gradient."""

    @abstractmethod
    def concerns(self, unit: Unit) -> bool:
        """Whether ranks agree here on which of its gradients exist."""

    @abstractmethod
    def scale(self, reduction: Reduction, counts: dict[int, int]) -> None:
        """Turn a mean over all ranks into another one."""

    def sends(self, unit: Unit) -> bool:
        """Whether reducing the unit now is collective, rather than a sum on this rank."""
        return self._reducer.requires_sync or (
            self._reducer.sums_sharded and any(h.placement.sums_in_shards for h in unit.handles)
        )

    def take(self, unit: Unit) -> None:
        """Reduce a unit with all ranks; one without gradients brings zeros."""
        self._taken = unit
        try:
            self._reducer.reduce(unit)
        finally:
            self._taken = None

    def settle(self, units: Sequence[Unit], reduced: Iterable[Unit] = ()) -> None:
        """Exchange which gradients of these units exist, and reduce what any rank has left.

        Args:
            reduced: those that all ranks have reduced in this pass.
        """
        present: dict[int, set[int]] = {}
        for each in self._reducer.undelivered():
            present.setdefault(id(each.handle), set()).update(each.present)
        handles = [handle for unit in units for handle in unit.handles]
        keys = [
            (handle, index) for handle in handles for index in handle.gradients.layout.trainable
        ]
        rest = [unit for unit in units if unit not in reduced]
        flags = [i in present.get(id(h), ()) or _has_gradient(h, i) for h, i in keys]
        table = self._exchange.bits([*flags, *map(self._has_left, rest)])
        columns = [sum(column) for column in zip(*table, strict=True)]
        self._counts = {}
        for (handle, index), count in zip(keys, columns, strict=False):
            self._counts.setdefault(id(handle), {})[index] = count
        for unit, is_left in zip(rest, columns[len(keys) :], strict=True):
            if is_left:
                self.take(unit)

    def _has_left(self, unit: Unit) -> bool:
        return any(
            (self._reducer.requires_sync and handle.gradients.is_waiting)
            or any(p.grad is not None for p in handle.unsharded_params)
            for handle in unit.handles
        )

    def exchange_presence(
        self, reductions: list[Reduction]
    ) -> Callable[[], list[tuple[Reduction, set[int]]]]:
        """As the reducer's; `settle` has exchanged the part of these units."""
        rest = [each for each in reductions if not self.concerns(each.unit)]
        others = self._reducer.exchange_presence(rest) if rest else list

        def answer() -> list[tuple[Reduction, set[int]]]:
            found = {id(reduction): present for reduction, present in others()}
            for reduction in reductions:
                if id(reduction) not in found:
                    counts = self._counts[id(reduction.handle)]
                    found[id(reduction)] = {index for index, count in counts.items() if count}
                    self.scale(reduction, counts)
            return [(reduction, found[id(reduction)]) for reduction in reductions]

        return answer

    def scale_to(self, reduction: Reduction, counts: dict[int, int]) -> None:
        """Turn a mean over all ranks into one over so many, for each parameter."""
        if reduction.unit.options.gradient_scale == 1.0 or reduction.chunk is None:
            return  # A sum; or one rank alone.
        number = reduction.handle.placement.num_averaged
        self._context.streams.wait_on_host(reduction.landed)
        for index, part in reduction.handle.gradients.split(reduction.chunk):
            if counts.get(index, 0) not in (0, number):
                part.mul_(number / counts[index])


def _has_gradient(handle: FlatParamHandle, index: int) -> bool:
    """Whether this rank has one that is not reduced; as in `GradientBuffer.collect`."""
    is_new = handle.unsharded_params[index].grad is not None
    return index in handle.gradients.present or (
        is_new and handle.sharded_params[index].requires_grad
    )
