"""RootState: what the units of one model share, and what happens between them.

The root hears of four events: a forward call begins, ends or raises, the gradient of a forward
call's output arrives, the backward pass ends (hooks.py). It knows which passes are running, and
decides when a unit is done and reduced. Which units are full meanwhile is residency.py; how
collectives are named, and what follows when one fails, is operations.py.

Note [When a unit is done in backward]
    Autograd runs the nodes of one thread in falling order of their creation. So when the gradient
    of a forward call's output arrives, everything created after that call ended has run. Units
    whose calls of that forward all *began* after it ended are done: they are freed and reduced. No
    hook on leaves or inputs is needed, and the point is the same on every rank, whichever
    parameters had a gradient there.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.autograd import Variable

from layerzero.comm.diagnosis import CollectiveError
from layerzero.comm.streams import Mark, Streams
from layerzero.config import Accumulation, BackwardPrefetch, GatherBudget
from layerzero.core.groups import ShardGroup
from layerzero.core.placement import Placement
from layerzero.runtime.autocast import CastCache, in_autocast
from layerzero.runtime.awaited import check_first_forward
from layerzero.runtime.exec_order import Order
from layerzero.runtime.guards import refuse_export
from layerzero.runtime.leaf_checks import LeafChecks
from layerzero.runtime.operations import Operations, remembers_failure
from layerzero.runtime.passes import (
    FINISH_LAST,
    BackwardPass,
    ForwardCall,
    ForwardPass,
    Sentinel,
)
from layerzero.runtime.pieces import remember_root
from layerzero.runtime.reducer import GradientReducer
from layerzero.runtime.residency import Residency
from layerzero.runtime.saved_casts import CastWatch
from layerzero.runtime.states import ShardState, TrainingState
from layerzero.runtime.structure import Ignored, Structure
from layerzero.runtime.surroundings import check_surroundings
from layerzero.runtime.unit import Unit

_logger = logging.getLogger(__name__)
_NOTHING: AbstractContextManager[object] = nullcontext()
_is_tracing = torch._C._is_tracing


class UnshardHandle:
    """An explicit `unshard` under way."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def wait(self) -> None:
        """Show the full parameters once they are there."""
        self._unit.root.show_unsharded(self._unit)


class RootState:
    """State shared by the units of one model."""

    units: list[Unit]
    streams: Streams
    operations: Operations
    residency: Residency
    reducer: GradientReducer
    weights_mark: Mark
    """Behind the last change of main shards on the compute stream."""
    freed_mark: Mark
    """Behind the last use of any full buffer that was freed."""
    offloaded_mark: Mark
    """Behind the last copy of a reduced chunk to the host."""
    uploaded_mark: Mark
    """Behind the last copy of a main shard from the host, until the host waited for it."""
    tensor_parallel_groups: tuple[ShardGroup, ...]
    """Along the axes of the mesh of DTensor parameters."""
    structure: Structure
    """What was in the module tree when it was wrapped."""
    looks_first: bool
    """Whether `check_first_forward` comes before the next forward."""
    wrapper_ref: Callable[[], nn.Module | None]
    """The wrapper around the outermost module."""

    def __init__(
        self,
        units: Sequence[Unit],
        device: torch.device,
        forward_depth: int,
        backward_prefetch: BackwardPrefetch | None,
        budget: GatherBudget,
        budget_is_default: bool,
        accumulation: Accumulation,
        tensor_parallel_groups: tuple[ShardGroup, ...],
        ignored: Ignored,
    ) -> None:
        self.units = list(units)
        self.structure = Structure(self.units, ignored)
        self.wrapper_ref = lambda: None
        self.device = device
        self.tensor_parallel_groups = tensor_parallel_groups
        placements = {id(h.placement): h.placement for unit in units for h in unit.handles}
        groups = [group for placement in placements.values() for group in placement.all_groups]
        self.streams = Streams(device, any(group.backend == "gloo" for group in groups))
        self.operations = Operations(device, self.streams, [*groups, *tensor_parallel_groups])
        self.residency = Residency(
            self.units, forward_depth, backward_prefetch, budget, budget_is_default
        )
        self.reducer = GradientReducer(accumulation, budget.max_nbytes)
        self.weights_mark = None
        self.freed_mark = None
        self.offloaded_mark = None
        self.uploaded_mark = None
        self._casts = CastCache(device)
        self.cast_watch = CastWatch(self.units)
        self._leaf_checks = LeafChecks(self.units)
        self._profiling = torch.autograd._profiler_enabled
        self._clock = 0
        self._call_depth = 0
        self._forward_pass = ForwardPass(0)
        self._passes: list[BackwardPass] = []
        self.looks_first = any(unit.awaits_values for unit in self.units)
        self._join_units()
        remember_root(self)

    def _join_units(self) -> None:
        placements: dict[Placement, Placement] = {}
        for index, unit in enumerate(self.units):
            unit.join(self, index)
            for handle in unit.handles:
                # One object for equal ones, so that what goes by placement is done once for all.
                handle.placement = placements.setdefault(handle.placement, handle.placement)
            lists = [each for each in (unit.forward_prefetch, unit.backward_prefetch) if each]
            if lists:  # Of a nested wrapper.
                self.looks_first = True
                self.residency.make_room_for(max(map(len, lists)))

    # Small services -------------------------------------------------------------------------

    def profile(self, action: str, unit: Unit) -> AbstractContextManager[object]:
        """A range in the profiler's timeline, and a log record at DEBUG where it begins.

        Free when no profiler runs and the level is off.
        """
        if _logger.isEnabledFor(logging.DEBUG):
            _logger.debug("LayerZeRO3.%s(%s)", action, unit.label)
        if self._profiling():
            return torch.profiler.record_function(f"LayerZeRO3.{action}({unit.label})")
        return _NOTHING

    @property
    def is_wrapped(self) -> bool:
        """Whether somebody still has the wrapper; one that only a cycle holds is gone."""
        if self.wrapper_ref() is not None:
            gc.collect()
        return self.wrapper_ref() is not None

    @property
    def in_backward(self) -> bool:
        """Whether autograd is running a backward pass of this model."""
        return bool(self._passes)

    def clear_abandoned(self) -> None:
        """Reset what a backward pass that failed left behind."""
        if self._passes and (
            self._passes[0].is_abandoned or torch._C._current_graph_task_id() == -1
        ):
            self.abort()

    # Unsharding that is asked for -----------------------------------------------------------

    @remembers_failure
    def gather_units(self) -> None:
        """Start gathering all units and keep them. Collective; does not block the host.

        Raises:
            CollectiveError: a collective of this model failed.
        """
        self.clear_abandoned()
        self.weights_mark = self.streams.mark_compute()
        self.residency.gather_all(distrusts=not self.reducer.adds_up)

    @remembers_failure
    def unshard_explicitly(self, unit: Unit, async_op: bool) -> UnshardHandle | None:
        """What `ZeRO3.unshard` does."""
        self.clear_abandoned()
        self.weights_mark = self.streams.mark_compute()
        if unit.is_stale:
            unit.reshard()
        unit.gather()
        unit.explicitly_unsharded = True
        self._wait_for_uploads()
        unit.watch_leaves()
        if async_op:
            return UnshardHandle(unit)
        self.show_unsharded(unit)
        return None

    @remembers_failure
    def show_unsharded(self, unit: Unit) -> None:
        """Wait for an explicit `unshard` and show its parameters, unless they were freed since."""
        if unit.state is not ShardState.SHARDED:
            unit.wait_for_unshard()
            unit.show_full()

    @remembers_failure
    def pregather(self, units: Sequence[Unit], waits: bool) -> None:
        """What `layerzero.pregather` does."""
        if self.operations.failure is not None:
            self.operations.refuse()
        self.clear_abandoned()
        if self._passes or self._call_depth:
            raise RuntimeError("pregather inside forward or backward: call it between them")
        self.weights_mark = self.streams.mark_compute()
        if not self.reducer.adds_up:
            self.residency.distrust()
        self.residency.gather_ahead(units)
        for unit in units:
            unit.explicitly_unsharded = bool(unit.handles)
        self._wait_for_uploads()
        if waits:
            self.streams.wait_on_host(self.streams.mark_compute())

    # Forward --------------------------------------------------------------------------------

    @remembers_failure
    def begin_call(self, unit: Unit) -> ForwardCall:
        """A forward call of `unit` begins: make its parameters full."""
        if self._call_depth == 0:
            self._begin_forward(unit)
        self._call_depth += 1
        self._clock += 1
        call = ForwardCall(unit, self._forward_pass, self._clock)
        if in_autocast():
            call.in_autocast = True
            self._note_casts(call)
        if unit.training_state is TrainingState.IDLE:
            unit.set_training_state(TrainingState.FORWARD)
        unit.depth += 1
        try:
            self.residency.make_full(unit, in_backward=bool(self._passes))
        except BaseException as error:
            self.abandon_call(call, error)
            raise
        first_forward = self._leaf_checks.first_forward
        if first_forward is not None and unit.depth == 1 and not self._passes:
            first_forward.begin_call(unit)
        return call

    def _begin_forward(self, unit: Unit) -> None:
        if _is_tracing() or torch.compiler.is_exporting():
            refuse_export(unit.label)
        if self.operations.failure is not None:
            self.operations.refuse()
        if self.looks_first:
            check_first_forward(self)
            self.looks_first = False
        self.clear_abandoned()
        self._forward_pass = ForwardPass(self._clock)
        if self._passes:
            return  # Recomputation: its visits belong to the backward pass.
        self.structure.check("forward")
        check_surroundings(piece for each in self.units for piece in each.pieces)
        self._leaf_checks.before_forward()
        self.weights_mark = self.streams.mark_compute()
        self.residency.begin_forward(unit, distrusts=not self.reducer.adds_up)

    def _note_casts(self, call: ForwardCall) -> None:
        """`call` is under autocast, and so perhaps the first to cast the unit's parameters."""
        forward_pass = call.forward_pass
        if not forward_pass.cast_start:
            # Recomputation is not asked: it would count the question as an operation of its own.
            open_starts = (max(unit.open_starts) for unit in self.units if unit.open_starts)
            forward_pass.shares_casts = bool(self._passes) or self._casts.shared_by(
                call.start, max(open_starts, default=None)
            )
            forward_pass.keeps_casts = forward_pass.shares_casts or torch.is_grad_enabled()
        forward_pass.cast_start.setdefault(call.unit, call.start)

    @remembers_failure
    def end_call(self, call: ForwardCall) -> None:
        """The forward of `call` has returned."""
        grad_enabled = torch.is_grad_enabled()
        first_forward = self._leaf_checks.first_forward
        if first_forward is not None and call.unit.depth == 1 and not self._passes:
            first_forward.end_call(call.unit)
        self._leave(call)
        if call.unit.depth == 0 and call.unit.training_state is TrainingState.IDLE:
            self.residency.free_after_forward(call.unit, grad_enabled)
            if call.in_autocast and not call.forward_pass.keeps_casts:
                self._casts.drop()
        self._clock += 1
        call.end = self._clock
        if grad_enabled:
            start = call.forward_pass.cast_start.get(call.unit, call.start)
            call.forward_pass.first_start.setdefault(call.unit, start)
            if not self._passes:
                call.unit.open_starts.add(call.start)
        if self._call_depth == 0 and not self._passes:
            self._wait_for_uploads()
            self._forward_pass.order = self.residency.end_forward(grad_enabled)
            error = self._leaf_checks.after_forward()
            if error is not None:
                self.abort(error)
                raise error

    def _leave(self, call: ForwardCall) -> None:
        self._call_depth = max(self._call_depth - 1, 0)
        unit = call.unit
        unit.depth = max(unit.depth - 1, 0)
        if unit.depth == 0 and unit.training_state is TrainingState.FORWARD:
            unit.set_training_state(TrainingState.IDLE)
            unit.show_sharded()

    def _wait_for_uploads(self) -> None:
        """Main shards on the host are read by the device no more: anybody may write them."""
        self.streams.wait_on_host(self.uploaded_mark)
        self.uploaded_mark = None

    def abandon_call(self, call: ForwardCall, error: BaseException) -> None:
        """The forward of `call` raised.

        In a backward pass this may be recomputation that has seen enough; a real error there ends
        the pass, and what it left is cleared when the next one begins.
        """
        self._leave(call)
        if self._call_depth == 0 and not self._passes:
            self.abort(error)

    # Backward -------------------------------------------------------------------------------

    @remembers_failure
    def on_output_gradient(self, call: ForwardCall) -> None:
        """The gradient of an output of `call` is there: its backward begins."""
        graph_task = torch._C._current_graph_task_id()
        if call.graph_task == graph_task:
            return
        call.graph_task = graph_task
        call.unit.open_starts.discard(call.start)
        current = self._backward_pass(graph_task, call.forward_pass.order)
        self._finish_done(current, call)
        self._passes[0].forwards[call.forward_pass] = None
        unit = call.unit
        self._enter_backward(current, unit, call.forward_pass.first_start.get(unit, call.start))
        if unit.handles:
            prefetches = self.residency.backward_prefetch is BackwardPrefetch.BACKWARD_PRE
            self.residency.demand(unit, prefetches, in_backward=True)

    def _backward_pass(self, graph_task: int, order: Order) -> BackwardPass:
        """The pass autograd is in now; a new one on first sight."""
        self.clear_abandoned()
        for backward_pass in self._passes:
            if backward_pass.graph_task == graph_task:
                return backward_pass
        backward_pass = BackwardPass(graph_task)
        if not self._passes:
            self.reducer.begin_backward(self)
        if not self._passes and not self.residency.recorder.is_recording:
            # Else `torch.autograd.grad` runs inside a forward, and is part of its order.
            self.residency.recorder.begin(("backward", order))
            backward_pass.is_recorded = True
        if torch.is_grad_enabled():
            # A graph of the backward itself (create_graph) uses full parameters again, and no hook
            # tells when: units stay full, and are reduced last, until a backward without it ends.
            self.residency.graph_of_backward = backward_pass.makes_graph = True
        self._passes.append(backward_pass)
        sentinel = Sentinel()
        backward_pass.sentinel = weakref.ref(sentinel, self._show_sharded_soon)

        def final_callback(_alive: Sentinel = sentinel) -> None:
            self._end_backward(backward_pass)

        Variable._execution_engine.queue_callback(final_callback)
        return backward_pass

    @property
    def _show_sharded_soon(self) -> Callable[[object], None]:
        """For when a pass fails: `parameters()` are the pieces at once, the rest can wait."""
        root_ref = weakref.ref(self)

        def show_sharded(_: object) -> None:
            root = root_ref()
            if root is not None and root._passes and root._passes[0].is_abandoned:
                for unit in root.units:
                    unit.show_sharded()

        return show_sharded

    def _enter_backward(self, current: BackwardPass, unit: Unit, start: int) -> None:
        self._passes[0].touched.add(unit)
        for backward_pass in self._passes:
            if unit in backward_pass.active:
                before = backward_pass.active[unit]
                backward_pass.active[unit] = start if before == FINISH_LAST else min(before, start)
                return
        current.active[unit] = start
        unit.set_training_state(TrainingState.BACKWARD)

    def _finish_done(self, current: BackwardPass, call: ForwardCall) -> None:
        """See Note [When a unit is done in backward]."""
        if self.residency.graph_of_backward:
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
                self.residency.free(unit)
                current.active[unit] = FINISH_LAST
            else:
                self._finish_unit(current, unit)

    def _finish_unit(self, current: BackwardPass, unit: Unit, stays: bool = False) -> None:
        if not stays:
            self.residency.free(unit, returns=not self.reducer.requires_sync)
        unit.show_sharded()
        if unit.is_trainable:
            self._reduce(unit)
        del current.active[unit]
        unit.set_training_state(TrainingState.IDLE)

    @remembers_failure
    def on_leaf_gradient(self, unit: Unit) -> None:
        """A leaf of an explicitly unsharded unit, used outside its forward, has its gradient."""
        if unit.training_state is not TrainingState.BACKWARD:
            current = self._backward_pass(torch._C._current_graph_task_id(), ())
            self._enter_backward(current, unit, FINISH_LAST)

    def _reduce(self, unit: Unit) -> None:
        self.reducer.reduce(self, unit)
        if self.residency.backward_prefetch is BackwardPrefetch.BACKWARD_POST and self._passes:
            self.residency.prefetch_after(unit, in_backward=True)

    @remembers_failure
    def _end_backward(self, ended: BackwardPass) -> None:
        first = None
        if self._passes[0] is ended and not self.reducer.requires_sync:
            first = ended.first_unit  # See Note [The first unit stays between micro-batches].
        try:
            for unit in sorted(ended.active, key=lambda unit: -ended.active[unit]):
                self._finish_unit(ended, unit, stays=unit is first)
            if self._passes[0] is not ended:
                self._passes.remove(ended)
                return
            if self.reducer.requires_sync or self.reducer.sums_sharded:
                self._reduce_untouched(ended)
            self.reducer.deliver(self)
            self.reducer.end_backward()
        except BaseException as error:
            self.abort(error)
            raise
        self._passes.clear()
        self._wait_for_uploads()
        if ended.is_recorded:
            self.residency.recorder.end()
        self.residency.graph_of_backward = ended.makes_graph
        if self.reducer.requires_sync:
            for unit in self.units:
                unit.drop_kept_shards()
        oldest = min((forward_pass.start for forward_pass in ended.forwards), default=0)
        for unit in self.units:
            # Older forwards were passed over: most likely nobody will go back through them.
            unit.open_starts = {start for start in unit.open_starts if start >= oldest}
            if unit.state is not ShardState.SHARDED and not unit.depth and unit is not first:
                self.residency.free(unit)
        self.residency.first = first

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
                    self._reduce(unit)
        if not self.reducer.requires_sync:
            return
        for unit in self.units:
            if unit not in ended.touched and any(h.gradients.is_waiting for h in unit.handles):
                self._reduce(unit)

    @remembers_failure
    def reduce_waiting(self) -> None:
        """Reduce, outside a backward pass, what micro-batches inside `no_sync` left.

        Every unit takes part that could have gradients: which ones wait may differ between ranks.
        """
        if self.operations.failure is not None:
            self.operations.refuse()
        self.clear_abandoned()
        if self._passes or self._call_depth:
            raise RuntimeError(
                "reduce_gradients inside forward or backward: call it between them, or leave "
                "no_sync before the last backward"
            )
        if not self.reducer.adds_up:
            return
        syncs, self.reducer.requires_sync = self.reducer.requires_sync, True
        try:
            for unit in reversed(self.units):
                if unit.is_trainable:
                    self._reduce(unit)
            self.reducer.deliver(self)
            self.reducer.end_accumulation()
        except BaseException as error:
            self.abort(error)
            raise
        finally:
            self.reducer.requires_sync = syncs

    def abort(self, error: BaseException | None = None) -> None:
        """Back to the state between steps, after an error or an interrupt.

        Gradients that were not delivered are dropped, unreduced sums of earlier micro-batches
        included; `.grad` of the sharded parameters is as before the failed pass.
        """
        if isinstance(error, CollectiveError) or self.operations.failure is not None:
            return  # See Note [A failed collective is final].
        self._passes.clear()
        self._call_depth = 0
        self.residency.abort()
        self.reducer.drop()
        for unit in self.units:
            unit.reset()
