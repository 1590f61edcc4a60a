"""Forward calls, forward passes and backward passes: the bookkeeping that belongs to each run."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from layerzero.runtime.exec_order import Order
from layerzero.runtime.unit import Unit


class ForwardPass:
    """One run of the outermost module: which units it called with autograd on."""

    def __init__(self, start: int) -> None:
        self.start = start
        self.first_start: dict[Unit, int] = {}
        self.cast_start: dict[Unit, int] = {}
        """Start of each unit's first call under autocast, with autograd on or off."""
        self.shares_casts = False
        """Whether it uses casts of an earlier forward; see Note [Casts are older than their uses]
        in autocast.py."""
        self.keeps_casts = True
        """Whether autocast keeps casts of units that are freed; see `CastCache.drop`."""
        self.order: Order = ()

    def note_casts(self, unit: Unit, start: int) -> None:
        """A call of `unit` under autocast begins, perhaps the first that casts its parameters."""
        self.cast_start.setdefault(unit, start)

    def decide_casts(self, are_shared: bool, are_kept: bool) -> None:
        self.shares_casts, self.keeps_casts = are_shared, are_kept

    def note_call(self, unit: Unit, start: int) -> None:
        """A call of `unit` with autograd on has ended, which began at `start`."""
        self.first_start.setdefault(unit, self.cast_start.get(unit, start))

    def ended(self, order: Order) -> None:
        self.order = order


class ForwardCall:
    """One forward call of one unit. Hooks on its outputs hold it; it lives as long as its graph."""

    __slots__ = ("_graph_task", "end", "forward_pass", "in_autocast", "start", "unit")

    def __init__(
        self, unit: Unit, forward_pass: ForwardPass, start: int, in_autocast: bool
    ) -> None:
        self.unit = unit
        self.forward_pass = forward_pass
        self.start = start
        self.end = start
        self.in_autocast = in_autocast
        self._graph_task: int | None = None
        """The backward pass that has reached this call last."""

    def ended(self, end: int) -> None:
        self.end = end

    def is_reached_first(self, graph_task: int) -> bool:
        """Whether that backward pass has not reached the call before."""
        is_new = self._graph_task != graph_task
        self._graph_task = graph_task
        return is_new


class Sentinel:
    """Lives as long as autograd keeps a backward pass's final callback."""


class BackwardPass:
    """One run of autograd's engine; reentrant checkpointing nests them."""

    def __init__(self, graph_task: int, makes_graph: bool, is_recorded: bool) -> None:
        """
        Args:
            makes_graph: whether the pass is itself differentiated (`create_graph`).
            is_recorded: whether the recorder's open pass is this one.
        """
        self.graph_task = graph_task
        self.makes_graph = makes_graph
        self.is_recorded = is_recorded
        self.active: dict[Unit, int] = {}
        """Units this pass has reached -> start of their first call in that forward. They are
        reduced once everything that was created after their calls has run."""
        self.deferred: dict[Unit, None] = {}
        """Units this pass has reached that are reduced when it ends."""
        self.forwards: dict[ForwardPass, None] = {}
        """Forwards this pass goes back through; kept by the outermost pass alone."""
        self.touched: set[Unit] = set()
        """Units reached by this pass or one nested in it; kept by the outermost pass alone."""
        self._sentinel: weakref.ref[Sentinel] | None = None

    def watch(self, sentinel: Sentinel, on_abandoned: Callable[[object], None]) -> None:
        """`sentinel` lives in the final callback; `on_abandoned` is called when it is dropped."""
        self._sentinel = weakref.ref(sentinel, on_abandoned)

    def has(self, unit: Unit) -> bool:
        """Whether the pass has reached `unit` and not finished it."""
        return unit in self.active or unit in self.deferred

    def enter(self, unit: Unit, start: int | None) -> None:
        """The pass has reached a unit, whose first call began at `start`; None: deferred."""
        if start is None:
            self.defer(unit)
        else:
            self.active[unit] = min(self.active.get(unit, start), start)
            self.deferred.pop(unit, None)

    def defer(self, unit: Unit) -> None:
        """Reduce a unit when the pass ends."""
        self.active.pop(unit, None)
        self.deferred[unit] = None

    def finished(self, unit: Unit) -> None:
        self.active.pop(unit, None)
        self.deferred.pop(unit, None)

    def unfinished(self) -> list[Unit]:
        """What is left to reduce: the last to begin first, and then what was deferred."""
        last_first = sorted(self.active, key=lambda unit: -self.active[unit])
        return [*last_first, *self.deferred]

    @property
    def first_unit(self) -> Unit | None:
        """The one with parameters that the forwards it went through began with."""
        starts = {
            unit: start
            for forward_pass in self.forwards
            for unit, start in forward_pass.first_start.items()
            if unit.handles
        }
        return min(starts, key=lambda unit: starts[unit], default=None)

    @property
    def is_abandoned(self) -> bool:
        """An error ended the pass: autograd dropped its final callback without running it."""
        return self._sentinel is not None and self._sentinel() is None
