"""Backward: which backward passes are running, and when a unit is done in one and reduced.

Note [When a unit is done in backward]
    Autograd runs the nodes of one thread in falling order of their creation. So when the gradient
    of a forward call's output arrives, everything created after that call ended has run. Units
    whose calls of that forward all *began* after it ended are done: they are freed and reduced. No
    hook on leaves or inputs is needed, and the point is the same on every rank, whichever
    parameters had a gradient there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch.autograd import Variable

from layerzero.config import BackwardPrefetch
from layerzero.runtime.context import RuntimeContext
from layerzero.runtime.exec_order import Order
from layerzero.runtime.operations import Operations, remembers_failure
from layerzero.runtime.passes import BackwardPass, ForwardCall, Sentinel
from layerzero.runtime.reducer import GradientReducer
from layerzero.runtime.states import TrainingState
from layerzero.runtime.unit import Unit
from layerzero.runtime.unshard_scheduler import UnshardScheduler


class Backward:
    """The backward passes of one model."""

    def __init__(
        self,
        context: RuntimeContext,
        units: Sequence[Unit],
        scheduler: UnshardScheduler,
        reducer: GradientReducer,
        abort: Callable[[BaseException | None], None],
    ) -> None:
        """
        Args:
            units: the root's list.
            abort: brings the whole model back to the state between steps; keeps nothing alive.
        """
        self._context = context
        self._units = units
        self._scheduler = scheduler
        self._reducer = reducer
        self._abort = abort
        self._passes: list[BackwardPass] = []
        """Those that run now, outermost first."""

    @property
    def operations(self) -> Operations:
        return self._context.operations

    @property
    def _is_abandoned(self) -> bool:
        return bool(self._passes) and self._passes[0].is_abandoned

    def clear_abandoned(self) -> None:
        """Reset what a backward pass that failed left behind."""
        if self._passes and (
            self._passes[0].is_abandoned or torch._C._current_graph_task_id() == -1
        ):
            self._abort(None)

    @remembers_failure
    def on_output_gradient(self, call: ForwardCall) -> None:
        """The gradient of an output of `call` is there: its backward begins."""
        graph_task = torch._C._current_graph_task_id()
        if not call.is_reached_first(graph_task):
            return
        call.unit.open_starts.discard(call.start)
        current = self._backward_pass(graph_task, call.forward_pass.order)
        self._finish_done(current, call)
        self._passes[0].forwards[call.forward_pass] = None
        unit = call.unit
        self._enter_backward(current, unit, call.forward_pass.first_start.get(unit, call.start))
        if unit.handles:
            prefetches = self._scheduler.backward_prefetch is BackwardPrefetch.BACKWARD_PRE
            self._scheduler.ensure_unsharded(unit, prefetches, in_backward=True)

    def _backward_pass(self, graph_task: int, order: Order) -> BackwardPass:
        """The pass autograd is in now; a new one on first sight."""
        self.clear_abandoned()
        for backward_pass in self._passes:
            if backward_pass.graph_task == graph_task:
                return backward_pass
        is_recorded = False
        if not self._passes:
            self._reducer.begin_backward()
            # An open pass is a forward that `torch.autograd.grad` runs in, whose order this is of.
            is_recorded = not self._scheduler.recorder.is_recording
        if is_recorded:
            self._scheduler.recorder.begin(("backward", order))
        makes_graph = torch.is_grad_enabled()
        if makes_graph:
            # A graph of the backward itself (create_graph) uses full parameters again, and no hook
            # tells when: units stay full, and are reduced last, until a backward without it ends.
            self._scheduler.hold_for_graph(True)
        backward_pass = BackwardPass(graph_task, makes_graph, is_recorded)
        self._passes.append(backward_pass)
        self._context.set_in_backward(True)
        sentinel = Sentinel()
        backward_pass.watch(sentinel, self._on_abandoned())

        def final_callback(_alive: Sentinel = sentinel) -> None:
            self._end_backward(backward_pass)

        Variable._execution_engine.queue_callback(final_callback)
        return backward_pass

    def forget_passes(self) -> None:
        self._passes.clear()
        self._context.set_in_backward(False)

    def _on_abandoned(self) -> Callable[[object], None]:
        """For when a pass fails: `parameters()` are the pieces at once, the rest can wait."""
        backward_ref = weakref.ref(self)

        def show_sharded(_: object) -> None:
            backward = backward_ref()
            if backward is not None and backward._is_abandoned:
                for unit in backward._units:
                    unit.show_sharded()

        return show_sharded

    def _enter_backward(self, current: BackwardPass, unit: Unit, start: int | None) -> None:
        self._passes[0].touched.add(unit)
        for backward_pass in self._passes:
            if backward_pass.has(unit):
                backward_pass.enter(unit, start)
                return
        current.enter(unit, start)
        unit.set_training_state(TrainingState.BACKWARD)

    def _finish_done(self, current: BackwardPass, call: ForwardCall) -> None:
        """See Note [When a unit is done in backward]."""
        if self._scheduler.holds_for_graph:
            return
        done = [
            unit
            for unit, start in current.active.items()
            if start > call.end and unit is not call.unit
        ]
        for unit in done:
            if call.forward_pass.shares_casts or any(
                start < current.active[unit] for start in unit.open_starts
            ):
                # An earlier forward is still to come back, perhaps in this very pass, and then
                # autograd holds the gradients until they are summed, or they come through casts
                # of an earlier one: free, but wait with them.
                self._scheduler.free_in_backward(unit)
                current.defer(unit)
            else:
                self._finish_unit(current, unit)

    def _finish_unit(self, current: BackwardPass, unit: Unit) -> None:
        self._scheduler.free_in_backward(unit, regathered_this_step=not self._reducer.requires_sync)
        unit.show_sharded()
        if self._scheduler.backward_prefetch is BackwardPrefetch.BACKWARD_POST:
            # Before the reduction is started, so that on one connection the gather, which the next
            # unit waits for, goes first; and in the memory that was just freed.
            self._scheduler.prefetch_after(unit, in_backward=True, behind_reductions=False)
        if unit.is_trainable:
            self._reducer.reduce(unit)
        current.finished(unit)
        unit.set_training_state(TrainingState.IDLE)

    @remembers_failure
    def on_leaf_gradient(self, unit: Unit) -> None:
        """A leaf of an explicitly unsharded unit, used outside its forward, has its gradient."""
        if unit.training_state is not TrainingState.BACKWARD:
            current = self._backward_pass(torch._C._current_graph_task_id(), ())
            self._enter_backward(current, unit, None)

    @remembers_failure
    def _end_backward(self, ended: BackwardPass) -> None:
        first = None
        if self._passes[0] is ended and not self._reducer.requires_sync:
            first = ended.first_unit  # See Note [The first unit stays between micro-batches].
            if first is not None:
                self._scheduler.keep_first(first)
        try:
            for unit in ended.unfinished():
                self._finish_unit(ended, unit)
            if self._passes[0] is not ended:
                self._passes.remove(ended)
                return
            if self._reducer.requires_sync or self._reducer.sums_sharded:
                self._reduce_untouched(ended)
            self._reducer.deliver()
            self._reducer.end_backward()
        except BaseException as error:
            self._abort(error)
            raise
        self.forget_passes()
        self._context.wait_for_uploads()
        if ended.is_recorded:
            self._scheduler.recorder.end()
        self._scheduler.hold_for_graph(ended.makes_graph)
        if self._reducer.requires_sync:
            for unit in self._units:
                unit.drop_post_forward_shards()
        oldest = min((forward_pass.start for forward_pass in ended.forwards), default=0)
        for unit in self._units:
            unit.forget_starts_before(oldest)
        self._scheduler.end_backward(first)

    def _reduce_untouched(self, ended: BackwardPass) -> None:
        """Take part in the reductions of units this backward did not reach.

        Another rank may have reached them; and gradients that add up (`no_sync`) leave with the
        first backward that synchronizes.
        """
        for forward_pass in ended.forwards:
            starts = forward_pass.first_start
            for unit in sorted(starts, key=lambda unit: -starts[unit]):
                if unit.is_trainable and unit not in ended.touched:
                    ended.touched.add(unit)
                    self._reducer.reduce(unit)
        if not self._reducer.requires_sync:
            return
        for unit in self._units:
            if unit not in ended.touched and any(h.gradients.is_waiting for h in unit.handles):
                self._reducer.reduce(unit)
