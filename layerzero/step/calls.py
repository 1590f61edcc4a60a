"""ForwardCall, ForwardPass, BackwardPass: the bookkeeping of one run of each.

Times (`start`, `end`) are values of the root's clock, which ticks at each begin and end of a call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

from layerzero.step.exec_order import Order
from layerzero.step.unit import Unit


class ForwardPass:
    """One run of the outermost module: which units it called with autograd on."""

    def __init__(self, start: int) -> None:
        self.start = start
        self.first_start: dict[Unit, int] = {}
        """Start of each unit's first call with autograd on."""
        self.order: Order = ()
        """Order in which it gathered units; set when it has ended."""

    def note_call(self, unit: Unit, start: int) -> None:
        """A call of `unit` with autograd on has ended, which began at `start`."""
        self.first_start.setdefault(unit, start)

    def ended(self, order: Order) -> None:
        self.order = order


class ForwardCall:
    """One forward call of one unit. Hooks on its outputs reference it, so it lives as long as its
    graph."""

    __slots__ = ("_graph_task", "end", "forward_pass", "start", "unit")

    def __init__(self, unit: Unit, forward_pass: ForwardPass, start: int) -> None:
        self.unit = unit
        self.forward_pass = forward_pass
        self.start = start
        self.end = start
        self._graph_task: int | None = None
        """Autograd's id of the backward pass that has reached this call last."""

    def ended(self, end: int) -> None:
        self.end = end

    def is_reached_first(self, graph_task: int) -> bool:
        """Whether this backward pass reaches the call for the first time; notes that it has."""
        is_new = self._graph_task != graph_task
        self._graph_task = graph_task
        return is_new


class Sentinel:
    """Lives as long as autograd keeps the final callback of a backward pass."""


class BackwardPass:
    """One run of autograd's engine; reentrant checkpointing nests them."""

    def __init__(self, graph_task: int, makes_graph: bool, is_recorded: bool) -> None:
        """
        Args:
            graph_task: autograd's id of the run.
            makes_graph: whether it builds a graph of itself (`create_graph`).
            is_recorded: whether the recorder's open pass is this one.
        """
        self.graph_task = graph_task
        self.makes_graph = makes_graph
        self.is_recorded = is_recorded
        self.active: dict[Unit, int] = {}
        """Units that this pass has reached -> start of their first call in that forward. A unit is
        reduced once every autograd node created after that start has run."""
        self.deferred: dict[Unit, int] = {}
        """Units that this pass has reached, to be reduced when it ends -> the same start; -1 if
        unknown."""
        self.forwards: dict[ForwardPass, None] = {}
        """Forwards whose graph this pass runs; maintained in the outermost pass only."""
        self.touched: set[Unit] = set()
        """Units reached by this pass or nested ones; maintained in the outermost pass only."""
        self._sentinel: weakref.ref[Sentinel] | None = None

    def watch(self, sentinel: Sentinel, on_abandoned: Callable[[object], None]) -> None:
        """Call `on_abandoned` when `sentinel`, which the final callback references, is dropped."""
        self._sentinel = weakref.ref(sentinel, on_abandoned)

    def has(self, unit: Unit) -> bool:
        """Whether the pass has reached `unit` and has not finished it."""
        return unit in self.active or unit in self.deferred

    def enter(self, unit: Unit, start: int | None) -> None:
        """The pass has reached a unit whose first call began at `start`; None: defer the unit."""
        if start is None:
            self.defer(unit)
        else:
            self.active[unit] = min(self.active.get(unit, start), start)
            self.deferred.pop(unit, None)

    def defer(self, unit: Unit) -> None:
        """Reduce a unit only when the pass ends."""
        self.deferred[unit] = self.active.pop(unit, -1)

    def finished(self, unit: Unit) -> None:
        self.active.pop(unit, None)
        self.deferred.pop(unit, None)

    def unfinished(self) -> list[Unit]:
        """Units left to reduce, latest start first.

        Deferred ones among them: when a unit is deferred may differ between ranks.
        """
        starts = {**self.active, **self.deferred}
        return sorted(starts, key=starts.__getitem__, reverse=True)

    @property
    def first_unit(self) -> Unit | None:
        """The first unit with parameters, of the earliest forward that this pass ran through, that
        no rank may skip."""
        starts = {
            unit: start
            for forward_pass in self.forwards
            for unit, start in forward_pass.first_start.items()
            if unit.handles and not unit.is_optional
        }
        return min(starts, key=lambda unit: starts[unit], default=None)

    @property
    def is_abandoned(self) -> bool:
        """Whether an error ended the pass: autograd dropped the final callback instead of running
        it."""
        return self._sentinel is not None and self._sentinel() is None
