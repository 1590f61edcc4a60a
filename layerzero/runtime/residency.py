"""Residency: which units are full: gathered when they are needed, or ahead; kept; freed.

The root says where the step is. What comes next is what the user, a plan or the recorded order of
earlier passes says, as far ahead as the limiter admits.

Note [One unit stays]
    A unit is not freed when its forward ends but when the next unit's begins, or when another's
    ends. So the last one of a forward stays for the backward that follows, and a step of U units
    gathers 2U - 1 times.

Note [The first unit stays between micro-batches]
    Inside `no_sync` the weights do not change from a backward to the next forward, so the unit that
    ends the one and begins the other is kept: a gather less for each micro-batch but the first.

Note [Micro-batches in flight]
    A pipeline stage runs forwards of some micro-batches between backwards of others, on the same
    weights. So it has units stay (`keeps_units`) from the first forward to the last backward: each
    is gathered once, instead of twice for each micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from layerzero.comm.limiter import GatherLimiter
from layerzero.config import BackwardPrefetch, GatherBudget
from layerzero.runtime.exec_order import ExecOrderRecorder, Order
from layerzero.runtime.states import ShardState, TrainingState
from layerzero.runtime.unit import Unit


class Residency:
    """Gathers, keeps and frees the units of one model."""

    limiter: GatherLimiter
    recorder: ExecOrderRecorder
    last_order: Order
    """The longest forward order recorded so far."""
    forward_depth: int
    """How many units of a recorded order are gathered ahead in forward."""
    backward_depth: int
    """The same in backward."""
    backward_prefetch: BackwardPrefetch | None
    """When the next unit of a backward pass is gathered; None: when it is needed."""
    gathers_all_first: bool
    """Whether a forward begins by gathering every unit, and waits for them."""
    keeps_units: bool
    """Whether units stay once gathered, until `free_all`; see Note [Micro-batches in flight]."""
    graph_of_backward: bool
    """Whether units stay because a graph of the backward (`create_graph`) uses them again."""
    first: Unit | None
    """See Note [The first unit stays between micro-batches]."""

    def __init__(
        self,
        units: Sequence[Unit],
        forward_depth: int,
        backward_prefetch: BackwardPrefetch | None,
        budget: GatherBudget,
        budget_is_default: bool,
    ) -> None:
        """`units` is the root's list."""
        self.limiter = GatherLimiter(budget)
        self.recorder = ExecOrderRecorder()
        self.last_order = ()
        self.forward_depth = forward_depth
        self.backward_depth = 1
        self.backward_prefetch = backward_prefetch
        self.gathers_all_first = False
        self.keeps_units = False
        self.graph_of_backward = False
        self.first = None
        self._units = units
        self._budget_is_default = budget_is_default
        self._kept: Unit | None = None
        """See Note [One unit stays]."""

    # What to expect -------------------------------------------------------------------------

    def make_room_for(self, depth: int) -> None:
        """The default budget follows explicit prefetch lists; a budget of the user's stays."""
        budget = self.limiter.budget
        if self._budget_is_default and budget.max_units is not None:
            self.limiter.budget = GatherBudget(max_units=max(budget.max_units, depth + 2))

    def expect(
        self, forward: Mapping[Unit, Sequence[Unit]], backward: Mapping[Unit, Sequence[Unit]]
    ) -> None:
        """What to gather when a unit begins, in passes of which no order was recorded yet.

        Must be the same on every rank. As far ahead as the longest list reaches, recorded orders
        are followed from then on.
        """
        for unit in self._units:
            unit.expected_in_forward = tuple(forward.get(unit, ()))
            unit.expected_in_backward = tuple(backward.get(unit, ()))
        self.forward_depth = max(map(len, forward.values()), default=0)
        self.backward_depth = max(map(len, backward.values()), default=0)
        self.make_room_for(max(self.forward_depth, self.backward_depth))

    def ordered_units(self) -> list[Unit]:
        """Units in the order of the longest recorded forward; others after, as wrapped."""
        first = [self._units[index] for index in dict.fromkeys(self.last_order)]
        return first + [unit for unit in self._units if unit not in first]

    # All units ------------------------------------------------------------------------------

    def begin_forward(self, unit: Unit, distrusts: bool) -> None:
        """A forward of the model begins with `unit`. `distrusts`: see `distrust`."""
        for other in self._units:
            # What an earlier forward left resident may be older than the weights.
            stays = other.explicitly_unsharded or other is self.first or self.keeps_units
            if other.state is not ShardState.SHARDED and (other.is_stale or not stays):
                other.reshard()
                if self.graph_of_backward:
                    other.gather()  # A backward to come needs it, this forward or not.
        self.first = self._kept = None
        if distrusts:
            self.distrust()
        if self.gathers_all_first:
            self.gather_ahead(self._units)
        self.recorder.begin(("forward", unit.index, torch.is_grad_enabled(), unit.module.training))

    def end_forward(self, grad_enabled: bool) -> Order:
        """That forward has ended; the order in which it demanded units."""
        order = self.recorder.end()
        if len(order) >= len(self.last_order):
            self.last_order = order
        for unit in self._units:
            if unit.state is ShardState.SHARDED or unit.explicitly_unsharded:
                continue
            if unit.state is ShardState.GATHERING or not grad_enabled:
                self.free(unit)
        return order

    def gather_ahead(self, units: Sequence[Unit]) -> None:
        """Gather units before any is needed, and order compute after all of it."""
        with_parameters = [unit for unit in units if unit.handles]
        for unit in with_parameters:
            if unit.is_stale:
                unit.reshard()
            unit.gather()
        for unit in with_parameters:
            unit.wait_for_unshard()

    def gather_all(self, distrusts: bool) -> None:
        """Start gathering all units, and keep them. `distrusts`: see `distrust`."""
        if distrusts:
            self.distrust()
        for unit in self._units:
            if unit.is_stale:
                unit.reshard()
            if unit.handles:
                unit.gather()
        self.keeps_units = True

    def distrust(self) -> None:
        """Between optimizer steps weights may have been written in ways that versions miss.

        While micro-batches add up they have not, and the root does not ask for it.
        """
        for unit in self._units:
            if unit.state is ShardState.SHARDED:  # else unsharded by hand, and to stay so
                for handle in unit.handles:
                    handle.distrust()

    def free_all(self) -> None:
        """Free every unit, and keep units no longer. Between forward and backward calls."""
        self.keeps_units = False
        self._kept = self.first = None
        for unit in self._units:
            if unit.state is not ShardState.SHARDED:
                self.free(unit)

    def abort(self) -> None:
        """Back to the state between steps, but for the units themselves."""
        self._kept = self.first = None
        self.graph_of_backward = self.keeps_units = False
        self.recorder.abort()

    # One unit -------------------------------------------------------------------------------

    def make_full(self, unit: Unit, in_backward: bool) -> None:
        """Demand what a forward call of `unit` needs; in a backward pass it is recomputation."""
        is_reached = unit.training_state is TrainingState.BACKWARD
        if not unit.handles or (unit.shows_full and (unit.depth > 1 or is_reached)):
            return
        if self._kept is not None and self._kept is not unit:
            self.free(self._kept, returns=True)
        self._kept = None
        self.demand(unit, not in_backward or self.backward_prefetch is not None, in_backward)

    def demand(self, unit: Unit, prefetches: bool, in_backward: bool) -> None:
        """Make a unit full that is needed now; before waiting for it, perhaps gather others ahead.

        Only units that were not resident are recorded. Where a resident unit is met may depend on
        which parameters this rank used; where another one is met may not. So ranks record, predict
        and prefetch alike.
        """
        if self._kept is unit:
            self._kept = None
        if unit.state is not ShardState.UNSHARDED:
            self.recorder.visit(unit.index)
            unit.gather()
        if prefetches:
            self.prefetch_after(unit, in_backward)
        unit.wait_for_unshard()
        unit.show_full()

    def prefetch_after(self, unit: Unit, in_backward: bool) -> None:
        """Start gathering what comes after `unit` in the pass, as far as the limiter admits."""
        if in_backward:
            depth, expected = self.backward_depth, unit.expected_in_backward
            explicit: Sequence[Unit] | None = unit.backward_prefetch
        else:
            depth, expected = self.forward_depth, unit.expected_in_forward
            explicit = unit.forward_prefetch
        if explicit is None and self.recorder.is_first:
            explicit = expected
        if explicit is None:
            explicit = [self._units[index] for index in self.recorder.predict(depth)]
        for other in explicit:
            if other.state is ShardState.SHARDED and other.handles:
                # What is kept is resident in the end anyway, however early it is gathered.
                if not (self.keeps_units or self.limiter.admits(other.nbytes)):
                    with other.root.profile("budget_full", other):  # seen, and takes no time
                        return
                with other.root.profile("prefetch", other):
                    other.gather(behind_reductions=in_backward)

    def free_after_forward(self, unit: Unit, grad_enabled: bool) -> None:
        """The forward of `unit` has ended, and was no recomputation."""
        if not unit.handles:
            return
        if self._kept is not None:
            self.free(self._kept, returns=True)
            self._kept = None
        if not unit.options.reshard_after_forward:
            return
        if grad_enabled:
            self._kept = unit  # See Note [One unit stays].
        else:
            self.free(unit)

    def free(self, unit: Unit, returns: bool = False) -> None:
        """Free a unit, unless all stay. `returns`: see `Unit.reshard`."""
        if not (self.graph_of_backward or self.keeps_units):
            unit.reshard(returns)
