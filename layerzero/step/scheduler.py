"""UnshardScheduler: decides when each unit is unsharded, prefetched, kept and resharded.

The root reports the progress of the step. Prefetching follows the user's lists, a plan's, or the
execution-order recorder, as far ahead as the rate limiter admits. The reasons to keep a unit
unsharded are flags on the unit (`Unit.holds`). Only this file sets and clears them, but for those
of the user's own calls and of optional units; a unit that is resharded loses most of them.

Note [One unit stays]
    A unit is not freed when its forward ends, but when the forward of another unit begins or ends.
    So the last unit of a forward stays for the backward that follows, and a step of U units
    issues 2U - 1 gathers.

Note [The first unit stays between micro-batches]
    Inside `no_sync` the weights do not change between a backward and the next forward. So the unit
    that is last in backward and first in forward is kept, which saves one gather for each
    micro-batch but the first.

Note [What runs without gradients]
    A forward that computes gradients may call some units without: a momentum encoder, whose weights
    the program updates right before, perhaps through `.data`, which changes no version. So the
    first of these units is gathered by its call, from weights written so far, and never ahead.

Note [Micro-batches in flight]
    A pipeline stage runs forwards of some micro-batches between backwards of others, on the same
    weights. So it keeps units from the first forward to the last backward: each is gathered
    once, instead of twice for each micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import torch

from layerzero.config import BackwardPrefetch
from layerzero.flat.flat_param import version_of
from layerzero.step.context import RuntimeContext
from layerzero.step.exec_order import ExecOrderRecorder, Order
from layerzero.step.unit import BACKWARD, GATHERING, SHARDED, UNSHARDED, Hold, Unit

# Plain ints: arithmetic on enum members runs Python code, and these are used in every call.
_LAST, _FIRST, _POLICY, _EXPLICIT, _MICRO_BATCHES, _DOUBLE_BACKWARD, _OPTIONAL, _ = map(int, Hold)
_OVER_PASSES = _MICRO_BATCHES | int(Hold.AFTER_BACKWARD)
_OF_A_FORWARD = _LAST | _POLICY
_OF_A_STEP = _LAST | _POLICY | _FIRST | _EXPLICIT


class UnshardScheduler:
    """Unshards, keeps and frees the units of one model."""

    last_order: Order = ()
    """The longest forward order recorded so far."""
    forward_depth: int
    """Number of units of a recorded order to prefetch in forward."""
    backward_depth = 1
    """Number of units of a recorded order to prefetch in backward."""
    backward_prefetch: BackwardPrefetch | None
    """When to prefetch in backward; None: each unit is gathered when it is needed."""
    holds_for_graph = False
    """Whether units stay unsharded for a graph of a backward (`create_graph`), which reads them."""
    unshards_all_before_forward = False
    """Whether a forward begins by gathering every unit and ordering compute after all gathers."""
    last: Unit | None = None
    """The unit held as `LAST_OF_FORWARD`."""
    _has_gradients = False
    """Whether the forward that runs, or the last one, computes gradients."""

    def __init__(
        self,
        context: RuntimeContext,
        units: Sequence[Unit],
        forward_depth: int,
        backward_prefetch: BackwardPrefetch | None,
    ) -> None:
        """`units` is the root's list."""
        self.recorder = self._own_recorder = ExecOrderRecorder()
        self.forward_depth = forward_depth
        self.backward_prefetch = backward_prefetch
        self._context = context
        self._limiter = context.limiter
        self._units = units
        self._without_gradients: set[Unit] = set()
        """See Note [What runs without gradients]."""

    def set_aside_orders(self, are_aside: bool) -> None:
        """Whether the next passes are not all ranks': nothing is prefetched or remembered."""
        self.recorder = ExecOrderRecorder() if are_aside else self._own_recorder

    def begin_forward(self, unit: Unit, weights_may_have_changed: bool) -> None:
        """A forward of the model begins with `unit`. For the flag see `mark_stale`."""
        for other in self._units:
            for handle in other.handles:
                handle.noted_versions = [*map(version_of, handle.counted)]
            if other.state is SHARDED:
                # A hold left from the last step must not keep the unit in this one.
                other.end_hold(_OF_A_STEP)
                continue
            if other.is_held(_OPTIONAL):
                continue  # A backward may come that reaches it, and no rank gathers it there.
            # What an earlier forward left unsharded may be older than the weights. It stays only
            # under one of these holds, and only if the weights are the same.
            stays = other.is_held(_EXPLICIT | _FIRST | _OVER_PASSES)
            if not stays or other.is_stale or other.takes_over_data():
                other.reshard()
                if self.holds_for_graph:
                    # A graph made with create_graph reads it in a later backward, and no hook
                    # would gather it there.
                    for before_use in self._context.extensions.before_use:
                        before_use(other)
                    other.unshard()
            else:
                # These were to last until this forward, which decides again.
                other.end_hold(_FIRST | _OF_A_FORWARD)
        self.last = None
        if weights_may_have_changed:
            self.mark_stale()
        if self.unshards_all_before_forward:
            self.unshard_ahead(self._units)
        self._has_gradients = torch.is_grad_enabled()
        self.recorder.begin(("forward", unit.index, self._has_gradients, unit.module.training))

    def end_forward(self, grad_enabled: bool) -> Order:
        """The forward of the model has ended.

        Returns:
            The order in which it gathered units.
        """
        order = self.recorder.end()
        # Of forwards that all ranks run, the longest covers most units: it found fewer resident.
        if self.recorder is self._own_recorder and len(order) >= len(self.last_order):
            self.last_order = order
        for unit in self._units:
            if unit.state is SHARDED:
                continue
            if unit.is_held(_POLICY | _OPTIONAL):
                unit.show_sharded()
            if unit.state is GATHERING or not grad_enabled:
                # Prefetched but never used, or no backward follows that would use it.
                unit.free(_OF_A_FORWARD)
        return order

    def unshard_ahead(self, units: Sequence[Unit], waits: bool = True) -> None:
        """Start all gathers of these units; then, if it `waits`, order compute after all."""
        with_parameters = [unit for unit in units if unit.handles]
        for unit in with_parameters:
            if unit.is_stale:
                unit.reshard()
            unit.unshard()
        for unit in with_parameters if waits else ():
            unit.wait_for_unshard()

    def mark_stale(self) -> None:
        """Have sharded units rewrite their compute shards: writes through `.data` bump no version.

        Not called while micro-batches accumulate, when weights do not change.
        """
        for unit in self._units:
            # Others stay as they are: the user, or a hold, keeps them unsharded.
            if unit.state is SHARDED:
                for handle in unit.handles:
                    handle.mark_stale()

    def hold_micro_batches(self, holds: bool) -> None:
        """Keep units unsharded once gathered, or free them after their use again; frees none
        itself. See Note [Micro-batches in flight]."""
        for unit in self._units:
            (unit.hold if holds else unit.end_hold)(_MICRO_BATCHES)

    def free_all(self) -> None:
        """Free every unit not held for a graph, and end its other holds. Between passes, and after
        micro-batches in flight."""
        self.last = None
        for unit in self._units:
            unit.free(_MICRO_BATCHES | _OF_A_STEP)
        self.end_step()

    def end_step(self) -> None:
        """The optimizer comes next: free what only the gathers of this step read."""
        kept = []
        for unit in self._units:
            for handle in unit.handles:
                handle.drop_post_forward_shard()  # No backward needs it any more.
                if handle.has_compute_shard and unit.state is SHARDED:
                    kept.append(handle)
        if kept:
            # The stream that owns them waits for the last gathers, after which compute has come.
            streams = self._context.streams
            streams.pre_unshard.wait(streams.record_compute_event())
            for handle in kept:
                handle.free_compute_shard()

    def hold_for_graph(self, holds: bool) -> None:
        """Begin or end that hold, on all units. Frees nothing."""
        if holds != self.holds_for_graph:
            self.holds_for_graph = holds
            for unit in self._units:
                (unit.hold if holds else unit.end_hold)(_DOUBLE_BACKWARD)

    def end_backward(self, first: Unit | None) -> None:
        """Free what the pass left unsharded, except `first`, which begins the next micro-batch."""
        for unit in self._units:
            # A running forward (`depth`) still uses its unit: `torch.autograd.grad` inside it.
            if unit.state is not SHARDED and not unit.depth:
                unit.show_sharded()
                if unit is not first:
                    unit.free(_OF_A_STEP)

    def abort(self) -> None:
        """Return to the state between steps. The caller resets the units themselves."""
        self.last = None
        self.holds_for_graph = False
        self.recorder.abort()

    def free_last(self) -> None:
        if self.last is not None:
            self.last.free(_LAST, regathered_this_step=True)
            self.last = None

    def unshard_for_call(self, unit: Unit, in_backward: bool) -> None:
        """Unshard `unit` for a forward call; in a backward pass the call is a recomputation."""
        is_reached = unit.training_state is BACKWARD
        # Nothing to do without parameters. Nor if a call around this one, or the backward that this
        # call is recomputed for, has unsharded the unit already.
        if not unit.handles or (unit.shows_unsharded and (unit.depth > 1 or is_reached)):
            return
        if self.last is not None and self.last is not unit and not unit.is_optional:
            self.free_last()  # Another unit's forward begins: see Note [One unit stays].
        # `backward_prefetch=None` holds for units that recomputation needs, too.
        self.ensure_unsharded(
            unit, not in_backward or self.backward_prefetch is not None, in_backward
        )

    def ensure_unsharded(self, unit: Unit, prefetches: bool, in_backward: bool) -> None:
        """Unshard a unit that is needed now, and prefetch others before waiting for it.

        Records only visits that find the unit sharded or being gathered. A visit to a resident unit
        can differ between ranks (unused parameters); a visit that gathers cannot, because gathering
        is collective. So ranks record, predict and prefetch alike.
        """
        if self.last is unit:
            # Its use begins again; `free_after_forward` or `free_in_backward` decides again.
            self.last = None
            unit.end_hold(_LAST)
        if unit.state is not SHARDED:
            for handle in unit.handles:
                if handle.is_main_memory and handle.is_stale:
                    handle.note_gathered(handle.versions)
                elif not in_backward and handle.is_stale:  # Written inside this forward.
                    unit.reshard()
                    break
        for before_use in self._context.extensions.before_use:
            before_use(unit)
        # GATHERING counts as a visit: a correct prefetch must not drop the unit from the order.
        if unit.state is not UNSHARDED:
            if not unit.is_optional:
                self.recorder.visit(unit.index)
            if unit.state is SHARDED:
                if self._has_gradients and not (in_backward or torch.is_grad_enabled()):
                    self._without_gradients.add(unit)
                    self._context.note_weights()
                unit.unshard()
        # After this unit's own gather is queued, so that prefetches cannot delay it; before the
        # wait, so that they are in flight while this unit computes, even where waiting blocks.
        if prefetches:
            self.prefetch_after(unit, in_backward)
        unit.wait_for_unshard()
        unit.show_unsharded()

    def prefetch_after(
        self, unit: Unit, in_backward: bool, behind_reductions: bool | None = None
    ) -> None:
        """Start gathering the units after `unit` in the pass, as far as the rate limiter admits.

        Args:
            behind_reductions: see `Unit.unshard`; None: True in backward, False in forward.
        """
        if unit.is_optional or self.recorder is not self._own_recorder:
            return  # Ranks would not prefetch alike.
        if in_backward:
            depth = self.backward_depth
            explicit: Sequence[Unit] | None = unit.backward_prefetch
        else:
            depth = self.forward_depth
            explicit = unit.forward_prefetch
        if explicit is None:  # The user's list wins.
            explicit = [*map(self._units.__getitem__, self.recorder.predict(depth))]
            if self._without_gradients and not in_backward and torch.is_grad_enabled():
                explicit = [*takewhile(lambda e: e not in self._without_gradients, explicit)]
        limiter, context = self._limiter, self._context
        behind = in_backward if behind_reductions is None else behind_reductions
        for other in explicit:
            if other.state is SHARDED and other.may_prefetch:
                # The limiter cannot save memory for units held over passes: they all end up
                # resident. Otherwise stop here: a later unit must not take the room of this one.
                if not (limiter.admits(other.nbytes) or other.is_held(_OVER_PASSES)):
                    with context.profile("budget_full", other.label):  # an empty range, as a mark
                        return
                with context.profile("prefetch", other.label):
                    other.unshard(behind_reductions=behind)

    def free_after_forward(self, unit: Unit, grad_enabled: bool) -> None:
        """The forward of `unit` has ended. Not called for recomputation."""
        if not unit.handles or unit.is_optional:
            return  # An optional unit is freed by its extension.
        if self.last is not None:
            self.free_last()  # Only one unit stays: the one whose forward ended last.
        if not unit.options.reshard_after_forward:
            unit.hold(_POLICY)
        elif grad_enabled:
            self.last = unit  # See Note [One unit stays].
            unit.end_hold(_EXPLICIT)
            unit.hold(_LAST)
        else:
            unit.free(_EXPLICIT)

    def free_in_backward(self, unit: Unit, regathered_this_step: bool = False) -> None:
        """The backward of `unit` is over: free it unless another hold is left."""
        unit.free(_LAST | _POLICY | _EXPLICIT, regathered_this_step)
