"""UnshardScheduler: which units are full: unsharded when they are needed, or ahead; kept; freed.

The root says where the step is. What comes next is what the user, a plan or the execution-order
recorder says, as far ahead as the rate limiter admits. Why a unit stays full is written on the unit
(`Unit.holds`), and here alone do these reasons begin and end, but for those of a call by hand.

Note [One unit stays]
    A unit is not freed when its forward ends but when the next unit's begins, or when another's
    ends. So the last one of a forward stays for the backward that follows, and a step of U units
    gathers 2U - 1 times.

Note [The first unit stays between micro-batches]
    Inside `no_sync` the weights do not change from a backward to the next forward, so the unit that
    ends the one and begins the other is kept: a gather less for each micro-batch but the first.

Note [Micro-batches in flight]
    A pipeline stage runs forwards of some micro-batches between backwards of others, on the same
    weights. So it has units stay from the first forward to the last backward: each is gathered
    once, instead of twice for each micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from layerzero.config import BackwardPrefetch, GatherBudget
from layerzero.runtime.context import RuntimeContext
from layerzero.runtime.exec_order import ExecOrderRecorder, Order
from layerzero.runtime.states import Hold, ShardState, TrainingState
from layerzero.runtime.unit import Unit

# Plain ints: arithmetic with enum members runs Python code, and these are used in every call.
_LAST = int(Hold.LAST_OF_FORWARD)
_FIRST = int(Hold.FIRST_OF_FORWARD)
_POLICY = int(Hold.POLICY)
_EXPLICIT = int(Hold.EXPLICIT)
_MICRO_BATCHES = int(Hold.MICRO_BATCHES)
_DOUBLE_BACKWARD = int(Hold.DOUBLE_BACKWARD)
_OF_A_FORWARD = _LAST | _POLICY
_OF_A_STEP = _LAST | _POLICY | _FIRST | _EXPLICIT


class UnshardScheduler:
    """Unshards, keeps and frees the units of one model."""

    recorder: ExecOrderRecorder
    last_order: Order
    """The longest forward order recorded so far."""
    forward_depth: int
    """How many units of a recorded order are gathered ahead in forward."""
    backward_depth: int
    """The same in backward."""
    backward_prefetch: BackwardPrefetch | None
    """When the next unit of a backward pass is gathered; None: when it is needed."""
    unshards_all_before_forward: bool
    """Whether a forward begins by gathering every unit, and waits for them."""

    def __init__(
        self,
        context: RuntimeContext,
        units: Sequence[Unit],
        forward_depth: int,
        backward_prefetch: BackwardPrefetch | None,
        budget_is_default: bool,
    ) -> None:
        """`units` is the root's list."""
        self.recorder = ExecOrderRecorder()
        self.last_order = ()
        self.forward_depth = forward_depth
        self.backward_depth = 1
        self.backward_prefetch = backward_prefetch
        self.unshards_all_before_forward = False
        self._context = context
        self._limiter = context.limiter
        self._units = units
        self._budget_is_default = budget_is_default
        self._last: Unit | None = None
        """The one that is held as `LAST_OF_FORWARD`."""
        self._holds_for_graph = False

    # What to expect -------------------------------------------------------------------------

    def make_room_for(self, depth: int) -> None:
        """The default budget follows explicit prefetch lists; a budget of the user's stays."""
        budget = self._limiter.budget
        if self._budget_is_default and budget.max_units is not None:
            self._limiter.set_budget(GatherBudget(max_units=max(budget.max_units, depth + 2)))

    def set_static_prefetch(
        self, forward: Mapping[Unit, Sequence[Unit]], backward: Mapping[Unit, Sequence[Unit]]
    ) -> None:
        """What to gather when a unit begins, in passes of which no order was recorded yet.

        Must be the same on every rank. As far ahead as the longest list reaches, recorded orders
        are followed from then on.
        """
        for unit in self._units:
            unit.set_static_prefetch(forward.get(unit, ()), backward.get(unit, ()))
        self.forward_depth = max(map(len, forward.values()), default=0)
        self.backward_depth = max(map(len, backward.values()), default=0)
        self.make_room_for(max(self.forward_depth, self.backward_depth))

    def unshard_all_before_forward(self) -> None:
        """From now on a forward begins by gathering every unit."""
        self.unshards_all_before_forward = True

    def ordered_units(self) -> list[Unit]:
        """Units in the order of the longest recorded forward; others after, as wrapped."""
        first = [self._units[index] for index in dict.fromkeys(self.last_order)]
        return first + [unit for unit in self._units if unit not in first]

    # All units ------------------------------------------------------------------------------

    def begin_forward(self, unit: Unit, weights_may_have_changed: bool) -> None:
        """A forward of the model begins with `unit`. For the flag see `mark_stale`."""
        for other in self._units:
            if other.state is ShardState.SHARDED:
                other.end_hold(_OF_A_STEP)
                continue
            # What an earlier forward left resident may be older than the weights.
            stays = other.is_held(_EXPLICIT | _FIRST | _MICRO_BATCHES)
            if not stays or other.is_stale:
                other.reshard()
                if self._holds_for_graph:
                    other.unshard()  # A backward to come needs it, this forward or not.
            else:
                other.end_hold(_FIRST | _OF_A_FORWARD)
        self._last = None
        if weights_may_have_changed:
            self.mark_stale()
        if self.unshards_all_before_forward:
            self.unshard_ahead(self._units)
        self.recorder.begin(("forward", unit.index, torch.is_grad_enabled(), unit.module.training))

    def end_forward(self, grad_enabled: bool) -> Order:
        """That forward has ended; the order in which it demanded units."""
        order = self.recorder.end()
        if len(order) >= len(self.last_order):
            self.last_order = order
        for unit in self._units:
            state = unit.state
            if state is not ShardState.SHARDED and (
                state is ShardState.GATHERING or not grad_enabled
            ):
                # Prefetched for nothing; or there is no backward to stay for.
                unit.free(_OF_A_FORWARD)
        return order

    def unshard_ahead(self, units: Sequence[Unit]) -> None:
        """Gather units before any is needed, and order compute after all of it."""
        with_parameters = [unit for unit in units if unit.handles]
        for unit in with_parameters:
            if unit.is_stale:
                unit.reshard()
            unit.unshard()
        for unit in with_parameters:
            unit.wait_for_unshard()

    def unshard_all(self, weights_may_have_changed: bool) -> None:
        """Start gathering all units, and keep them. For the flag see `mark_stale`."""
        if weights_may_have_changed:
            self.mark_stale()
        for unit in self._units:
            if unit.is_stale:
                unit.reshard()
            if unit.handles:
                unit.unshard()
        self.hold_micro_batches()

    def mark_stale(self) -> None:
        """Between optimizer steps weights may have been written in ways that versions miss.

        While micro-batches add up they have not, and the root does not ask for it.
        """
        for unit in self._units:
            if unit.state is ShardState.SHARDED:  # else unsharded by hand, and to stay so
                for handle in unit.handles:
                    handle.mark_stale()

    def hold_micro_batches(self) -> None:
        """From now on units stay once gathered; see Note [Micro-batches in flight]."""
        for unit in self._units:
            unit.hold(_MICRO_BATCHES)

    def end_micro_batches(self) -> None:
        """From now on units are freed when their turn is over; none is at once."""
        for unit in self._units:
            unit.end_hold(_MICRO_BATCHES)

    def free_all(self) -> None:
        """Free every unit, and hold none any longer. Between forward and backward calls."""
        self._last = None
        for unit in self._units:
            unit.free(_MICRO_BATCHES | _OF_A_STEP)

    @property
    def holds_for_graph(self) -> bool:
        """Whether units stay because a graph of the backward (`create_graph`) uses them again."""
        return self._holds_for_graph

    def hold_for_graph(self, holds: bool) -> None:
        if holds != self._holds_for_graph:
            self._holds_for_graph = holds
            for unit in self._units:
                (unit.hold if holds else unit.end_hold)(_DOUBLE_BACKWARD)

    def end_backward(self, first: Unit | None) -> None:
        """Free what the pass left resident, but `first`, which begins the next micro-batch."""
        for unit in self._units:
            if unit is not first and unit.state is not ShardState.SHARDED and not unit.depth:
                unit.free(_OF_A_STEP)

    def abort(self) -> None:
        """Back to the state between steps, but for the units themselves."""
        self._last = None
        self._holds_for_graph = False
        self.recorder.abort()

    # One unit -------------------------------------------------------------------------------

    def unshard_for_call(self, unit: Unit, in_backward: bool) -> None:
        """Make full what a forward call of `unit` needs; in a backward it is recomputation."""
        is_reached = unit.training_state is TrainingState.BACKWARD
        if not unit.handles or (unit.shows_unsharded and (unit.depth > 1 or is_reached)):
            return
        last = self._last
        if last is not None and last is not unit:
            last.free(_LAST, regathered_this_step=True)
            self._last = None
        self.ensure_unsharded(
            unit, not in_backward or self.backward_prefetch is not None, in_backward
        )

    def ensure_unsharded(self, unit: Unit, prefetches: bool, in_backward: bool) -> None:
        """Make a unit full that is needed now; before waiting for it, perhaps gather others ahead.

        Only units that were not resident are recorded. Whether a visit finds a unit resident may
        depend on which parameters this rank used; a visit that gathers does not, since gathering is
        collective. So ranks record, predict and prefetch alike.
        """
        if self._last is unit:
            self._last = None
            unit.end_hold(_LAST)
        if unit.state is not ShardState.UNSHARDED:
            self.recorder.visit(unit.index)
            unit.unshard()
        if prefetches:
            self.prefetch_after(unit, in_backward)
        unit.wait_for_unshard()
        unit.show_unsharded()

    def prefetch_after(
        self, unit: Unit, in_backward: bool, behind_reductions: bool | None = None
    ) -> None:
        """Start gathering what comes after `unit` in the pass, as far as the limiter admits.

        Args:
            behind_reductions: as of `Unit.unshard`; None: in backward.
        """
        if in_backward:
            depth, static = self.backward_depth, unit.static_backward_prefetch
            explicit: Sequence[Unit] | None = unit.backward_prefetch
        else:
            depth, static = self.forward_depth, unit.static_forward_prefetch
            explicit = unit.forward_prefetch
        if explicit is None and self.recorder.is_first:
            explicit = static
        if explicit is None:
            explicit = [self._units[index] for index in self.recorder.predict(depth)]
        context = self._context
        behind = in_backward if behind_reductions is None else behind_reductions
        for other in explicit:
            if other.state is ShardState.SHARDED and other.handles:
                # What micro-batches hold is resident in the end anyway, however early it comes.
                if not (other.is_held(_MICRO_BATCHES) or self._limiter.admits(other.nbytes)):
                    with context.profile("budget_full", other.label):  # seen, and takes no time
                        return
                with context.profile("prefetch", other.label):
                    other.unshard(behind_reductions=behind)

    def free_after_forward(self, unit: Unit, grad_enabled: bool) -> None:
        """The forward of `unit` has ended, and was no recomputation."""
        if not unit.handles:
            return
        if self._last is not None:
            self._last.free(_LAST, regathered_this_step=True)
            self._last = None
        if not unit.options.reshard_after_forward:
            unit.hold(_POLICY)
        elif grad_enabled:
            self._last = unit  # See Note [One unit stays].
            unit.end_hold(_EXPLICIT)
            unit.hold(_LAST)
        else:
            unit.free(_EXPLICIT)

    def free_in_backward(self, unit: Unit, regathered_this_step: bool = False) -> None:
        """The backward of `unit` is over."""
        unit.free(_LAST | _POLICY | _EXPLICIT, regathered_this_step)

    def keep_first(self, unit: Unit) -> None:
        """See Note [The first unit stays between micro-batches]."""
        unit.hold(_FIRST)
