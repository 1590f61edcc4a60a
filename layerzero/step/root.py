"""RootState: the state of one wrapped model. It owns the units and the objects that drive them.

hooks.py calls it when a forward call begins, ends or raises, and calls `backward` when the gradient
of a call's output arrives. The rest is split by subject: context.py (what units share),
scheduler.py (which units are unsharded), backward.py (when a unit is done in backward),
reducer.py (where gradients go), operations.py (names and failures of collectives).
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import nn

from layerzero.comm.streams import Streams
from layerzero.config import GatherBudget, parse_nbytes
from layerzero.errors import CollectiveError
from layerzero.flat.placement import Placement, ShardGroup
from layerzero.step.backward import Backward, ForwardCall, ForwardPass
from layerzero.step.context import RateLimiter, RuntimeContext
from layerzero.step.extension import Extensions
from layerzero.step.ignored import Ignored
from layerzero.step.operations import Operations, remembers_failure
from layerzero.step.reducer import GradientReducer
from layerzero.step.scheduler import UnshardScheduler
from layerzero.step.unit import IDLE, Unit, get_unit


class RootState:
    """The state of one wrapped model."""

    extensions: Extensions
    """Features of the model; see extension.py."""
    optional: Any = None
    """The units that a rank may skip (`layerzero/optional`), or None."""
    arguments: Any
    """The `Arguments` of the model."""
    shown: Any = None
    """The `ShownStep` of its gradients (optim/steps.py), or None."""
    kept_whole: Sequence[nn.Parameter] = ()
    """Parameters of the model that are not sharded."""
    learner: Any = None
    """The `Learner` of a memory budget (`layerzero/memory_budget`), or None."""
    join: Any = None
    """The join that the model is inside of (`layerzero/uneven`), or None."""
    context: RuntimeContext
    """State that the units share, with this object's `streams`, `operations` and `device`."""
    placements: tuple[Placement, ...]
    """Placements of its flat parameters, each once."""
    structure: Any = None
    """The `Structure` of its module tree (`layerzero/module_tree`), or None."""
    has_forward_checks = True
    """Whether the next forward calls `check_parameters`."""
    moves_inputs = False
    """Whether a call that is in no other call moves its inputs to the model's device."""
    wrapper_ref: Callable[[], nn.Module | None]
    """Weak reference to the wrapper around the outermost module."""
    clock = 0
    """Begins and ends of calls so far."""
    _operations: type[Operations] = Operations
    _call_depth = 0
    _start = 0
    """Time at which the last forward began that was no recomputation."""

    def __init__(
        self,
        units: Sequence[Unit],
        arguments: Any,
        device: torch.device,
        budget: GatherBudget,
        tensor_parallel_groups: tuple[ShardGroup, ...],
        ignored: Ignored,
    ) -> None:
        self.units = list(units)
        self.arguments = arguments
        self.extensions = Extensions((), [h.events for unit in units for h in unit.handles])
        self.ignored = ignored
        ignored.name_in(self.units[0].module)
        self.wrapper_ref = lambda: None
        self.device = device
        self.tensor_parallel_groups = tensor_parallel_groups
        self.placements = tuple(dict.fromkeys(h.placement for unit in units for h in unit.handles))
        groups = [group for placement in self.placements for group in placement.all_groups]
        self.streams = self._make_streams(any(group.backend == "gloo" for group in groups))
        # Extensions refer to units, and these to the context: a cycle would outlive the model.
        extensions = cast(Extensions, weakref.proxy(self.extensions))
        self.operations = self._operations(
            device, self.streams, extensions, self.placements, tensor_parallel_groups
        )
        limiter, owner = RateLimiter(budget), weakref.ref(self)
        self.context = RuntimeContext(
            device, self.streams, self.operations, limiter, owner, extensions
        )
        depth, mode = arguments.forward_prefetch, arguments.backward_prefetch
        self.scheduler = UnshardScheduler(self.context, self.units, depth, mode)
        in_flight = parse_nbytes(arguments.reduction.in_flight or 0, "in_flight", 0)
        self.reducer = GradientReducer(self.context, self.units, arguments.accumulation, in_flight)
        self._forward_pass = ForwardPass(0)
        self.backward = Backward(self.context, self.units, self.scheduler, self.reducer)
        shared: dict[Placement, Placement] = {}
        for index, unit in enumerate(self.units):
            unit.join(self.context, index)
            for handle in unit.handles:
                handle.share_placement(shared)
            lists = [each for each in (unit.forward_prefetch, unit.backward_prefetch) if each]
            if lists:  # Set through a wrapper that this one is around.
                self.context.limiter.make_room_for(max(map(len, lists)))

    def _make_streams(self, on_gloo: bool) -> Streams:
        if on_gloo and self.device.type == "cpu":
            from layerzero.comm.gloo.threads import FinishingStream

            return Streams(self.device, FinishingStream())
        return Streams(self.device)

    @property
    def is_wrapped(self) -> bool:
        """Whether the wrapper is still alive, after a collection of reference cycles."""
        if self.wrapper_ref() is not None:
            gc.collect()
        return self.wrapper_ref() is not None

    @property
    def groups(self) -> tuple[ShardGroup, ...]:
        """Groups that together connect the model's data-parallel ranks; () without parameters."""
        wholes = (each.data_parallel or each for each in self.placements)
        return next((each.groups for each in wholes), ())

    @property
    def is_in_pass(self) -> bool:
        """Whether a forward or a backward runs."""
        return self.context.in_backward or self._call_depth > 0

    @property
    def is_in_outermost_call(self) -> bool:
        """Whether a call runs that is in no other call, nor in a backward."""
        return self._call_depth <= 1 and not self.context.in_backward

    def units_inside(self, module: nn.Module) -> list[Unit]:
        """The units of a module and of modules inside it, outermost first."""
        inside = {get_unit(part) for part in module.modules()}
        return [unit for unit in self.units if unit in inside]

    def check_between_steps(self, what: str) -> None:
        """Refuse a call inside forward or backward, or after a collective failed.

        Raises:
            RuntimeError: starts with `what`.
        """
        self.backward.clear_abandoned()
        if self.operations.failure is not None:
            self.operations.refuse()
        if self.is_in_pass:
            raise RuntimeError(what)

    def before_call(self, what: str) -> None:
        """A collective call begins that is no part of a forward or backward."""
        for between_passes in self.extensions.between_passes:
            between_passes(what)

    @remembers_failure
    def begin_call(self, unit: Unit) -> ForwardCall:
        """A forward call of `unit` begins: unshard it."""
        if self._call_depth == 0:
            self._begin_forward(unit)
        self._call_depth += 1
        self.clock += 1
        call = ForwardCall(unit, self._forward_pass, self.clock, self.clock)
        unit.enter_forward()
        try:
            self.scheduler.unshard_for_call(unit, in_backward=self.context.in_backward)
            if unit.depth == 1 and not self.context.in_backward:
                for begin_call in self.extensions.begin_call:
                    begin_call(unit)
        except BaseException as error:
            self.call_raised(call, error)
            raise
        return call

    def _begin_forward(self, unit: Unit) -> None:
        self.backward.clear_abandoned()
        if self.operations.failure is not None:
            self.operations.refuse()
        self._forward_pass = ForwardPass(self.clock)
        if self.context.in_backward:
            return  # A recomputation: its visits belong to the backward pass.
        self._start = self.clock
        self.streams.begin_pass()
        for before_forward in self.extensions.before_forward:
            before_forward(unit, self._forward_pass)
        if self.has_forward_checks:
            self.check_parameters()
        self.context.note_weights()
        self.scheduler.begin_forward(unit, weights_may_have_changed=not self.reducer.kept.adds_up)

    def check_next_forward(self) -> None:
        """Parameters were emptied or moved."""
        self.has_forward_checks = True

    def check_parameters(self) -> None:
        """The first forward begins, or the first after `check_next_forward`."""
        for before_first_forward in self.extensions.before_first_forward:
            before_first_forward()
        self.has_forward_checks = False

    @remembers_failure
    def end_call(self, call: ForwardCall, outputs: object) -> None:
        """The forward of `call` has returned `outputs`."""
        grad_enabled = torch.is_grad_enabled()
        is_outermost = self.is_in_outermost_call
        try:
            for exit_call in self.extensions.exit_call:
                exit_call(call, outputs, is_outermost)
            try:
                if call.unit.depth == 1 and not self.context.in_backward:
                    for end_call in self.extensions.end_call:
                        end_call(call.unit)
            finally:
                self._leave(call)
            # A recomputed unit stays in BACKWARD, and is freed when its backward is done.
            if call.unit.depth == 0 and call.unit.training_state is IDLE:
                self.scheduler.free_after_forward(call.unit, grad_enabled)
            self.clock += 1
            call.ended(self.clock)
            if grad_enabled:
                call.forward_pass.first_start.setdefault(call.unit, call.start)
                if not self.context.in_backward:
                    call.unit.open_starts.add(call.start)
            if is_outermost:
                # The user may write main shards on the host after a forward.
                self.context.wait_for_uploads()
                errors = [check() for check in self.extensions.after_forward]
                for error in filter(None, errors):
                    raise error
                self._forward_pass.ended(self.scheduler.end_forward(grad_enabled))
        except BaseException as error:
            if is_outermost:
                self.abort(error)
            raise

    def _leave(self, call: ForwardCall, has_raised: bool = False) -> None:
        if self._call_depth:
            self._call_depth -= 1
        call.unit.leave_forward(hides=has_raised or not self._call_depth)

    def call_raised(self, call: ForwardCall, error: BaseException) -> None:
        """The forward of `call` raised.

        In a backward pass this can be a recomputation that stops early on purpose. A real error
        there ends the pass, and the next one clears what it left.
        """
        for call_raised in self.extensions.call_raised:
            call_raised(call.unit, error)
        self._leave(call, has_raised=True)
        if self._call_depth == 0 and not self.context.in_backward:
            self.abort(error)

    def abort(self, error: BaseException | None = None) -> None:
        """Return to the state between steps, after an error or an interrupt.

        Drops gradients that were not delivered. `.grad` of the sharded parameters and unreduced
        sums of earlier micro-batches stay as they were before the failed pass. Does nothing once a
        collective has failed.
        """
        for before_abort in self.extensions.before_abort:
            before_abort(error)
        if isinstance(error, CollectiveError) or self.operations.failure is not None:
            return  # See Note [A failed collective is final].
        self.backward.forget_passes()
        self._call_depth = 0
        self.scheduler.abort()
        self.reducer.drop()
        for unit in self.units:
            for handle in unit.handles:
                handle.wait_for_unshard()
        # Before buffers are freed: something may have raised before anything referred to a message
        # that had been posted.
        self.streams.wait_until_idle()
        self.operations.wait_until_idle()
        for unit in self.units:
            unit.reset()
            unit.keep_starts(0, self._start)
        self.context.limiter.reset()
        self.context.replaced.clear()
        for after_abort in self.extensions.after_abort:
            after_abort()


def root_of(unit: Unit) -> RootState:
    """The root of the model that a unit currently belongs to.

    Raises:
        RuntimeError: the model was deleted.
    """
    root = unit.context.owner()
    if root is None:
        raise RuntimeError(f"{unit.label}: the wrapped model around it was deleted; keep it alive")
    return root  # type: ignore[return-value]  # not `cast`, a call for each call of a unit


def root_if_alive(unit: Unit) -> RootState | None:
    """`root_of`, or None if there is none: the unit has not joined, or its wrapper was deleted."""
    return cast("RootState | None", unit.context.owner()) if unit.has_joined else None
