"""Agreement: gathers and reductions of a pass in which ranks run different units."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence

from layerzero.optional.exchange import exchange_of
from layerzero.step.handle import FlatParamHandle
from layerzero.step.reduction import Reduction
from layerzero.step.root import RootState
from layerzero.step.unit import Unit


class Agreement:
    """Decides with other ranks what a scheduler gathers and a reducer reduces.

    A subclass is an `Extension` that also has `before_use` and `before_reduction`, and calls
    `settle` in `before_delivery`.
    """

    subject = "optional modules"
    """What ranks agree on, in errors."""

    def __init__(self, root: RootState) -> None:
        """Collective where the exchange makes new groups."""
        self._reducer, self._context, self._units = root.reducer, root.context, root.units
        self._exchange = exchange_of(root)
        self._taken: Unit | None = None
        """The unit that all ranks reduce now."""
        self._counts: dict[int, dict[int, int]] = {}
        """Flat parameter (by id) and index of a parameter -> number of ranks with a gradient."""

    def _request(self, request: int) -> None:
        """Take part in what other ranks want, until all take part in this; NOTHING: until no rank
        wants anything."""
        while (chosen := self._exchange.agree(request, self.subject)) != request:
            self._take_part(chosen)

    @abstractmethod
    def _take_part(self, request: int) -> None:
        """Do what this rank has not requested."""

    def concerns(self, unit: Unit) -> bool:
        """Whether ranks agree here on which of its gradients exist."""
        return True

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
        `reduced`: those that all ranks have reduced in this pass."""
        if not units:
            return
        present: dict[int, set[int]] = {}
        for each in self._reducer.undelivered():
            present.setdefault(id(each.handle), set()).update(each.present)
        handles = [handle for unit in units for handle in unit.handles]
        keys = [(handle, index) for handle in handles for index in handle.gradients.trainable]
        rest = [unit for unit in units if unit not in reduced]
        flags = [i in present.get(id(h), ()) or _has_gradient(h, i) for h, i in keys]
        columns = self._exchange.counts([*flags, *map(self._has_left, rest)], self.subject)
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
    ) -> Callable[[], list[tuple[Reduction, set[int]]]] | None:
        """As the reducer's; `settle` has exchanged the part of these units."""
        own = [each for each in reductions if self.concerns(each.unit)]
        if not own:
            return None
        rest = [each for each in reductions if not self.concerns(each.unit)]
        others = self._reducer.exchange_presence(rest) if rest else list

        def answer() -> list[tuple[Reduction, set[int]]]:
            found: list[tuple[Reduction, set[int]]] = others()
            for reduction in own:
                counts = self._counts[id(reduction.handle)]
                self.scale(reduction, counts)
                found.append((reduction, {index for index, count in counts.items() if count}))
            return found

        return answer

    def scale_to(self, reduction: Reduction, counts: dict[int, int]) -> None:
        """Turn a mean over all ranks into one over so many, for each parameter."""
        if reduction.unit.options.gradient_scale == 1.0:
            return  # A sum.
        number = reduction.handle.placement.num_averaged
        self._context.streams.wait_on_host(reduction.landed)
        for index, part in reduction.handle.gradients.pieces(reduction.chunk):
            if counts.get(index, 0) not in (0, number):
                part.mul_(number / counts[index])


def _has_gradient(handle: FlatParamHandle, index: int) -> bool:
    """Whether this rank has one that is not reduced; as in `GradientBuffer.collect`."""
    is_new = handle.unsharded_params[index].grad is not None
    return index in handle.gradients.present or (
        is_new and handle.sharded_params[index].requires_grad
    )
