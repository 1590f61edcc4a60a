"""Backward: tracks the running backward passes, and frees and reduces units that are done.

Note [When a unit is done in backward]
    Autograd runs the nodes of one thread in reverse order of their creation. So when the gradient
    of a forward call's output arrives, everything created after that call ended has run. Units
    whose calls of that forward all *began* after it ended are done: they are freed and reduced. No
    hook on parameters or inputs is needed, and it happens at the same point on every rank, no
    matter which parameters had a gradient there.

Times (`start`, `end`) are values of the root's clock, which ticks at each begin and end of a call.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd import Variable

from layerzero.config import BackwardPrefetch
from layerzero.step.context import RuntimeContext
from layerzero.step.exec_order import Order
from layerzero.step.operations import remembers_failure
from layerzero.step.reducer import GradientReducer
from layerzero.step.scheduler import UnshardScheduler
from layerzero.step.unit import BACKWARD, FORWARD, IDLE, UNSHARDED, Hold, Unit

_PRE, _POST = BackwardPrefetch  # See the names of states in unit.py.
_POLICY = int(Hold.POLICY)


@dataclass(eq=False)
class ForwardPass:
    """One run of the outermost module: which units it called with autograd on."""

    start: int
    first_start: dict[Unit, int] = field(default_factory=dict)
    """Start of each unit's first call with autograd on."""
    order: Order = ()
    """Order in which it gathered units."""

    def ended(self, order: Order) -> None:
        self.order = order


@dataclass(slots=True, eq=False)
class ForwardCall:
    """One forward call of one unit. Hooks on its outputs keep it alive as long as its graph."""

    unit: Unit
    forward_pass: ForwardPass
    start: int
    end: int
    _graph_task: int | None = None

    def ended(self, time: int) -> None:
        self.end = time

    def is_reached_first(self, graph_task: int) -> bool:
        """Whether the backward pass with this id of autograd has not reached the call before."""
        before, self._graph_task = self._graph_task, graph_task
        return before != graph_task


@dataclass(eq=False)
class BackwardPass:
    """One run of autograd's engine; reentrant checkpointing nests them."""

    graph_task: int
    """Autograd's id of the run."""
    makes_graph: bool
    """Whether it builds a graph of itself (`create_graph`)."""
    is_recorded: bool
    """Whether the recorder's open pass is this one."""
    active: dict[Unit, int] = field(default_factory=dict)
    """Units that this pass has reached -> start of their first call in that forward. A unit is
    reduced once every autograd node created after that start has run."""
    deferred: dict[Unit, int] = field(default_factory=dict)
    """Units that this pass has reached, to be reduced when it ends -> the same start; -1 if
    unknown."""
    forwards: dict[ForwardPass, None] = field(default_factory=dict)
    """Forwards whose graph this pass runs; maintained in the outermost pass only."""
    touched: set[Unit] = field(default_factory=set)
    """Units reached by this pass or nested ones; maintained in the outermost pass only."""
    _final_callback: weakref.ref[object] | None = None

    def watch(self, final_callback: object, on_abandoned: Callable[[object], None]) -> None:
        """Call `on_abandoned` when autograd drops the callback for its end, as errors make it."""
        self._final_callback = weakref.ref(final_callback, on_abandoned)

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
        """Whether an error ended the pass."""
        return self._final_callback is not None and self._final_callback() is None


class Backward:
    """The backward passes of one model."""

    def __init__(
        self,
        context: RuntimeContext,
        units: Sequence[Unit],
        scheduler: UnshardScheduler,
        reducer: GradientReducer,
    ) -> None:
        """`units` is the root's list."""
        self.operations = context.operations
        self._context = context
        self._units = units
        self._scheduler = scheduler
        self._reducer = reducer
        self._passes: list[BackwardPass] = []
        """The running passes, outermost first."""
        self._graphs: set[ForwardPass] = set()
        """Forwards whose backward made a graph that waits for a backward."""

    def _abort(self, error: BaseException | None) -> None:
        """Return the whole model, if it is still there, to the state between steps."""
        root: Any = self._context.owner()
        if root is not None:
            root.abort(error)

    def clear_abandoned(self) -> None:
        """Reset what a backward pass that failed left behind."""
        # Outside autograd no pass can be running, even if its final callback still exists.
        if self._passes and (
            self._passes[0].is_abandoned or torch._C._current_graph_task_id() == -1
        ):
            self._abort(None)

    @remembers_failure
    def on_output_gradient(self, call: ForwardCall) -> None:
        """The gradient of an output of `call` has arrived: the backward of the call begins."""
        graph_task = torch._C._current_graph_task_id()
        if not call.is_reached_first(graph_task) or call.unit.training_state is FORWARD:
            return  # Another output of this call; or `torch.autograd.grad` inside a later one.
        call.unit.open_starts.discard(call.start)
        current = self._backward_pass(graph_task, call.forward_pass)
        self._finish_done(current, call.end, call.unit)
        self._passes[0].forwards[call.forward_pass] = None
        unit = call.unit
        self._enter_backward(current, unit, call.forward_pass.first_start.get(unit, call.start))
        if unit.handles:
            # BACKWARD_POST prefetches when a unit is done, in `_finish_unit`.
            prefetches = self._scheduler.backward_prefetch is _PRE
            self._scheduler.ensure_unsharded(unit, prefetches, in_backward=True)
        for begin_backward in self._context.extensions.begin_backward:
            begin_backward(unit)

    def _backward_pass(self, graph_task: int, forward_pass: ForwardPass) -> BackwardPass:
        """The pass that autograd runs now; registers a new one."""
        for backward_pass in self._passes:
            if backward_pass.graph_task == graph_task:
                return backward_pass
        self.clear_abandoned()
        for before_backward in () if self._passes else self._context.extensions.before_backward:
            before_backward(forward_pass)
        makes_graph = torch.is_grad_enabled()
        if makes_graph:
            # A graph of the backward itself (create_graph) reads unsharded parameters again, and no
            # hook runs before that. So units stay unsharded, and are reduced when a pass ends,
            # until a backward without create_graph has ended. It may reach no output.
            self._scheduler.hold_for_graph(True)
            for unit in self._units:
                unit.watch_gradients()
        backward_pass = self._begin_pass(graph_task, forward_pass.order, makes_graph)
        final_callback = functools.partial(self._end_backward, backward_pass)
        backward_pass.watch(final_callback, self._on_abandoned())
        Variable._execution_engine.queue_callback(final_callback)
        return backward_pass

    def run_without_graph(self, forward_pass: ForwardPass) -> None:
        """Take part in a backward of other ranks, through a forward of theirs."""
        ended = self._begin_pass(-1, forward_pass.order, self._scheduler.holds_for_graph)
        ended.forwards[forward_pass] = None
        self._end_backward(ended)

    def _begin_pass(self, graph_task: int, order: Order, makes_graph: bool) -> BackwardPass:
        is_recorded = False
        if not self._passes:
            self._context.streams.begin_pass()
            self._reducer.begin_backward()
            for unit in self._units:
                # Since the forward, parameters may have been frozen and thawed for another one.
                unit.follow_requires_grad(begins_backward=True)
                if unit.state is UNSHARDED and unit.is_held(_POLICY):
                    unit.show_unsharded()  # A recomputation may use what the forward has shown.
            # If a pass is open, `torch.autograd.grad` runs inside a forward: its visits belong to
            # the forward's order.
            is_recorded = not self._scheduler.recorder.is_recording
        if is_recorded:
            self._scheduler.recorder.begin(("backward", order))
        begun = BackwardPass(graph_task, makes_graph, is_recorded)
        self._passes.append(begun)
        self._context.set_in_backward(True)
        return begun

    def forget_passes(self, graphs: Iterable[ForwardPass] = ()) -> None:
        self._passes.clear()
        self._graphs = set(graphs)
        self._context.set_in_backward(False)

    def _on_abandoned(self) -> Callable[[object], None]:
        """Show sharded parameters as soon as a pass fails; the next pass resets the rest."""
        backward_ref = weakref.ref(self)

        def show_sharded(_: object) -> None:
            backward = backward_ref()
            if backward and backward._passes and backward._passes[0].is_abandoned:
                if backward._context.streams.is_capturing():
                    return backward.clear_abandoned()  # Now: nothing may wait for a graph's events.
                for unit in backward._units:
                    # On a device autograd's thread runs this, perhaps beside the next pass.
                    if backward._passes:
                        unit.show_sharded()

        return show_sharded

    def _enter_backward(self, current: BackwardPass, unit: Unit, start: int | None) -> None:
        self._passes[0].touched.add(unit)
        # A nested pass may reach a unit of an outer one, which then finishes it.
        for backward_pass in self._passes:
            if unit in backward_pass.active or unit in backward_pass.deferred:
                backward_pass.enter(unit, start)
                return
        current.enter(unit, start)
        unit.set_training_state(BACKWARD)

    def _finish_done(self, current: BackwardPass, end: int, caller: Unit) -> None:
        """Free and reduce units that are done; see Note [When a unit is done in backward].

        Args:
            end: time when a call of `caller` ended, whose backward begins now.
        """
        if self._scheduler.holds_for_graph:
            # Units are read again by the graph of a backward, at a time that no hook reports.
            # `_end_backward` finishes them.
            return
        # Compared with the *first* call of each unit: until that has run backward, more gradients
        # can arrive. The calling unit begins its backward now. An optional one finishes optional
        # ones: ranks that skip it finish at another time what every rank reduces.
        done = []
        for unit, start in current.active.items():
            if start > end and unit is not caller and (unit.is_optional or not caller.is_optional):
                done.append(unit)
        # Latest start first: the same order, whether they are done at once or one after the other.
        if len(done) > 1:
            done.sort(key=current.active.__getitem__, reverse=True)
        for unit in done:
            if unit.open_starts and min(unit.open_starts) < current.active[unit]:
                # The gradients may be incomplete: an earlier forward has yet to run backward, and
                # if it does in this pass, autograd delivers one sum at the end. So free the unit
                # now, and reduce it when the pass ends.
                self._scheduler.free_in_backward(unit)
                current.defer(unit)
            else:
                self._finish_unit(current, unit)

    def _finish_unit(self, current: BackwardPass, unit: Unit) -> None:
        # Inside `no_sync` the next micro-batch gathers the same weights.
        self._scheduler.free_in_backward(unit, regathered_this_step=not self._reducer.requires_sync)
        # Even if a hold kept it unsharded: between passes users see sharded parameters.
        unit.show_sharded()
        if self._scheduler.backward_prefetch is _POST:
            # After the free, to reuse its memory. Before the reduction, to go first on a shared
            # connection: the next unit waits for the gather, and nothing yet for the reduction.
            self._scheduler.prefetch_after(unit, in_backward=True, behind_reductions=False)
        if unit.is_trainable:
            self._reducer.reduce(unit)
        current.active.pop(unit, None)
        current.deferred.pop(unit, None)
        unit.set_training_state(IDLE)

    @remembers_failure
    def on_unsharded_gradient(self, unit: Unit) -> None:
        """A watched unsharded parameter got its gradient. If it was used outside the unit's
        forward, or by a graph of a backward alone, no output hook has reported the unit."""
        if unit.training_state is not BACKWARD and unit.training_state is not FORWARD:
            graph = min(self._graphs, key=lambda each: each.start, default=ForwardPass(0))
            current = self._backward_pass(torch._C._current_graph_task_id(), graph)
            if self._graphs:
                self._passes[0].forwards[graph] = None
            self._enter_backward(current, unit, graph.first_start.get(unit))

    @remembers_failure
    def _end_backward(self, ended: BackwardPass) -> None:
        """Finish the units that are left; after the outermost pass, deliver all gradients."""
        is_outermost, first = self._passes[0] is ended, None
        with self._context.streams.on_main():
            if is_outermost and not self._reducer.requires_sync:
                # Before the loop below, which would free it: see Note [The first unit stays between
                # micro-batches].
                first = ended.first_unit
                if first is not None:
                    first.hold(int(Hold.FIRST_OF_FORWARD))
            try:
                # Latest start first, deferred units among the others: when a unit is deferred may
                # differ between ranks.
                starts = {**ended.active, **ended.deferred}
                for unit in sorted(starts, key=starts.__getitem__, reverse=True):
                    self._finish_unit(ended, unit)
                if not is_outermost:
                    # A nested pass (reentrant checkpointing); the outermost one delivers.
                    self._passes.remove(ended)
                    return
                self._reduce_untouched(ended)
                with self._context.profile("deliver", "model"):
                    for before_delivery in self._context.extensions.before_delivery:
                        before_delivery(ended.forwards)
                    self._reducer.deliver()
                self._reducer.commit()
                self._complete(ended, first)
            except BaseException as error:
                self._abort(error)
                raise

    def _complete(self, ended: BackwardPass, first: Unit | None) -> None:
        """Return to the state between steps."""
        # The optimizer comes next, and may write main shards on the host.
        self._context.wait_for_uploads()
        if ended.is_recorded:
            self._scheduler.recorder.end()
        own = ended.forwards.keys()
        oldest = min((forward_pass.start for forward_pass in own), default=0)
        # A backward without create_graph ends the hold, but for forwards after its own.
        waiting = {graph for graph in self._graphs - own if graph.start > oldest}
        self.forget_passes(self._graphs | own if ended.makes_graph else waiting)
        self._scheduler.hold_for_graph(bool(self._graphs))
        for unit in self._units:
            unit.keep_starts(oldest)
        for end_backward in self._context.extensions.end_backward:
            end_backward(ended.forwards)
        self._scheduler.end_backward(first)
        if self._reducer.requires_sync:
            # Not inside `no_sync`: the next micro-batch gathers the same weights.
            self._scheduler.end_step()

    def _reduce_untouched(self, ended: BackwardPass) -> None:
        """Take part in the reductions of units that this backward did not reach.

        Another rank may have reached them. And gradients accumulated inside `no_sync` are reduced
        by the first backward that synchronizes.
        """
        for forward_pass in ended.forwards:
            starts = forward_pass.first_start
            for unit in sorted(starts, key=lambda unit: -starts[unit]):
                # Where no hop runs, gradients stay on their rank.
                is_left = unit.is_trainable and unit not in ended.touched
                if is_left and any(self._reducer.hops_of(unit)):
                    ended.touched.add(unit)
                    self._reducer.reduce(unit)
        for unit in self._units:
            is_left = unit not in ended.touched and self._reducer.hops_of(unit)[0]
            if is_left and any(handle.gradients.is_waiting for handle in unit.handles):
                self._reducer.reduce(unit)
