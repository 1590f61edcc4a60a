"""Forward calls, forward passes and backward passes: the bookkeeping that belongs to each run."""

from __future__ import annotations

import weakref

from layerzero.runtime.exec_order import Order
from layerzero.runtime.unit import Unit

FINISH_LAST = -1
"""A start before every call: a unit with it is finished when the backward pass ends."""


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


class ForwardCall:
    """One forward call of one unit. Hooks on its outputs hold it; it lives as long as its graph."""

    __slots__ = ("end", "forward_pass", "graph_task", "in_autocast", "start", "unit")

    def __init__(self, unit: Unit, forward_pass: ForwardPass, start: int) -> None:
        self.unit = unit
        self.forward_pass = forward_pass
        self.start = start
        self.end = start
        self.in_autocast = False
        self.graph_task: int | None = None
        """The backward pass that has reached this call last."""


class Sentinel:
    """Lives as long as autograd keeps a backward pass's final callback."""


class BackwardPass:
    """One run of autograd's engine; reentrant checkpointing nests them."""

    def __init__(self, graph_task: int) -> None:
        self.graph_task = graph_task
        self.makes_graph = False
        """Whether the pass is itself differentiated (`create_graph`)."""
        self.is_recorded = False
        """Whether the recorder's open pass is this one."""
        self.active: dict[Unit, int] = {}
        """Units this pass has reached -> start of their first call in that forward."""
        self.forwards: dict[ForwardPass, None] = {}
        """Forwards this pass goes back through; kept by the outermost pass alone."""
        self.touched: set[Unit] = set()
        """Units reached by this pass or one nested in it; kept by the outermost pass alone."""
        self.sentinel: weakref.ref[Sentinel] | None = None

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
        return self.sentinel is not None and self.sentinel() is None
