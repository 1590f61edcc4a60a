"""GradientReducer: starts reductions in backward, and writes `.grad` when the pass ends.

One unit's reduction is in flight at a time: it overlaps with the next unit's backward, and its
buffers are freed before the next ones are allocated. With `ReductionPolicy.in_flight` there are
several, bounded by bytes: each has more than one unit's backward to travel in, for the price of the
gradients that it reads. Results are held back until the pass has ended, so that a pass that fails
changes no gradient the user can see.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from layerzero.comm.collectives import flags_tensor, gather_flags
from layerzero.comm.pending import Pending
from layerzero.config import ReductionPolicy, parse_nbytes
from layerzero.flat.gradients import Gradient
from layerzero.flat.groups import ShardGroup
from layerzero.flat.parameter_hooks import stepped_by_torch
from layerzero.step.accumulation import AccumulationCosts, choose_sharded
from layerzero.step.context import RuntimeContext
from layerzero.step.deliver import Delivery, note_steps
from layerzero.step.handle import FlatParamHandle
from layerzero.step.placeholders import Placeholders, WaitingGradient
from layerzero.step.reduction import Reduction, reduce_unit
from layerzero.step.unit import Unit

_logger = logging.getLogger(__name__)


class GradientReducer:
    """Reduces the gradients of units as they are done, and delivers them to `.grad`."""

    requires_sync: bool
    """False inside `no_sync`: gradients accumulate over micro-batches."""
    sums_sharded: bool
    """Whether gradients accumulate after the first hop of the reduction instead of before it."""

    is_skipping: bool
    """Whether gradients are dropped, until an optimizer's step or `zero_grad`."""

    num_waiting: int
    """Micro-batches whose gradients wait for their reduction."""

    def __init__(
        self, context: RuntimeContext, units: Sequence[Unit], policy: ReductionPolicy
    ) -> None:
        """`units` is the root's list."""
        accumulation, in_flight = policy.accumulation, policy.in_flight
        self._max_in_flight_nbytes = parse_nbytes(in_flight or 0, "in_flight", least=0)
        self._context = context
        self._units = units
        self.agreed: Any = None
        """Decides with other ranks what is reduced (`layerzero/optional`); None: every unit is."""
        self.requires_sync = True
        self.sums_sharded = accumulation == "sharded"
        self._is_auto = self._may_decide = accumulation == "auto"
        self.num_waiting = 0
        self._num_micro_batches = 2
        self._reason = ""
        self._step: Callable[[Unit | None], None] | None = None
        """Called with each unit once its `.grad`s are complete; last with None."""
        self._in_flight: list[Reduction] = []
        self._undelivered: list[Reduction] = []
        self._delivery = Delivery()
        self._placeholders = Placeholders()
        self._stand_ins: dict[nn.Parameter, WaitingGradient] = {}
        self._hid_placeholders = False
        self.is_skipping = self._skips_next = False
        self._others: Sequence[nn.Parameter] = ()

    def __del__(self) -> None:
        # After an error, reductions in flight are deleted with the model.
        if self.__dict__.get("_in_flight"):
            self._context.before_deletion()

    def set_requires_sync(self, requires_sync: bool) -> None:
        """False: gradients accumulate from now on."""
        self.requires_sync = requires_sync

    @property
    def may_decide_sums(self) -> bool:
        """Whether the engine chooses where micro-batches add up."""
        return self._may_decide

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches of the last step that had several; 2 before."""
        return self._num_micro_batches

    def decide_sums(self, sharded: bool) -> None:
        """Decide for "auto" where micro-batches add up from now on. Between steps."""
        self.sums_sharded, self._is_auto = sharded, False

    def call_on_delivered(self, function: Callable[[Unit | None], None] | None) -> None:
        """Let `function` use up gradients as they are delivered; None: they stay in `.grad`."""
        self._step = function

    @property
    def uses_up_gradients(self) -> bool:
        """Whether an optimizer steps while gradients are delivered."""
        return self._step is not None

    def begin_backward(self) -> None:
        """A backward pass of the whole model begins; "auto" decides where gradients accumulate."""
        self.give_up_if_cleared()
        self.hide()
        # Only for the first micro-batch: the later ones must add up in the same place.
        if not self._is_auto or self.requires_sync or self.adds_up:
            return
        handles = [handle for unit in self._units for handle in unit.handles]
        costs = AccumulationCosts.of(handles)
        self.sums_sharded, reason = choose_sharded(
            costs, self._num_micro_batches, self._context.limiter.budget.max_nbytes
        )
        if reason != self._reason and all(h.placement.is_first for h in handles):
            _logger.info("accumulation='auto': %s", reason)
        self._reason = reason

    @property
    def adds_up(self) -> bool:
        """Whether earlier micro-batches wait; the same on every rank that runs the same passes."""
        return self.num_waiting > 0

    def _end_accumulation(self) -> None:
        """The sum over micro-batches is delivered."""
        if self.num_waiting > 1:
            # "auto" expects as many micro-batches in the next step.
            self._num_micro_batches = self.num_waiting
        self.num_waiting = 0

    def reduce(self, unit: Unit) -> None:
        """Take the unit's gradients, and start the hops that are due; see `reduce_unit`.

        On CPU, blocks the host until earlier reductions are done that must not be in flight beside
        it.
        """
        if self.agreed is not None and not self.agreed.before_reduction(unit):
            return
        with torch.no_grad(), self._context.profile("reduce", unit.label):
            # Complete the oldest, until the others may be in flight beside the unit's.
            while self._in_flight and not self._fits(unit):
                self._complete_oldest()
            self._in_flight += reduce_unit(
                self._context, unit, self.requires_sync, self.sums_sharded
            )

    def _fits(self, unit: Unit) -> bool:
        if not self._max_in_flight_nbytes:
            return False
        # A unit's gradients have one buffer. It may be reduced twice in a pass (reentrant
        # checkpoints), and then the first reduction still reads it.
        if any(reduction.unit is unit for reduction in self._in_flight):
            return False
        handles = [reduction.handle for reduction in self._in_flight] + unit.handles
        return sum(h.gradients.in_flight_nbytes for h in handles) <= self._max_in_flight_nbytes

    def _complete_all(self) -> None:
        """Wait for the reductions in flight and free their input."""
        while self._in_flight:
            self._complete_oldest()

    def _complete_oldest(self) -> None:
        # Removed only when done: after an error `drop` has to wait for it, too.
        reduction = self._in_flight[0]
        if reduction.pending is not None:
            with self._context.profile("wait_for_reduce", reduction.unit.label):
                reduction.pending.wait()
            if reduction.is_partial:
                reduction.handle.gradients.release_buffer()
            else:
                reduction.handle.gradients.release()
        if not reduction.is_partial:
            self._undelivered.append(reduction)
        self._in_flight.pop(0)

    def deliver(self) -> None:
        """Wait for the last reductions, and prepare `commit`; run hooks of sharded parameters.

        Collective. Blocks the host on CPU, with offloaded parameters, and where this rank misses a
        gradient.
        """
        if self.agreed is not None:
            self.agreed.before_delivery()
        last = self.undelivered()
        if not last:
            self._complete_all()
            return
        with torch.no_grad():
            presence = self.exchange_presence(last)
            self._complete_all()
            with self._context.profile("wait_for_presence", "model"):
                arrived = presence()
            judges = self._context.extensions.before_write
            drops = [before_write([each for each, _ in arrived]) for before_write in judges]
            self._undelivered = []
        if any(drops) or self.is_skipping:
            self._drop_delivery(arrived)
            return
        if self._step is not None:
            self._deliver_and_step(arrived)
            return
        hooked = self._add_parts(arrived)
        if hooked:
            self._delivery.run_hooks(hooked)

    def undelivered(self) -> list[Reduction]:
        """Reductions of the pass whose gradients a delivery writes, in order of issue."""
        return [*self._undelivered, *[r for r in self._in_flight if not r.is_partial]]

    def drop_also(self, parameters: Sequence[nn.Parameter]) -> None:
        """Where gradients are dropped, drop those of these parameters, which are not sharded."""
        self._others = parameters

    def _drop_delivery(self, arrived: list[tuple[Reduction, set[int]]]) -> None:
        self._skips_next = True
        sharded = (p for unit in self._units for p in unit.sharded_params)
        self._delivery.clear([*sharded, *self._others])
        for reduction, _ in arrived:
            reduction.handle.gradients.release()

    # State of a step, kept until the program gives it up: see placeholders.py -------------------

    @property
    def keeps_step(self) -> bool:
        """Whether the step is left out, or earlier micro-batches wait."""
        return self.is_skipping or self._placeholders.are_placed or self._hid_placeholders

    def show(self) -> None:
        """Show in `.grad` what is kept of the step: also of one that failed, which may go on."""
        if self._placeholders.are_placed:
            return
        handles = [handle for unit in self._units for handle in unit.handles]
        if self.is_skipping:
            sharded = (p for handle in handles for p in handle.sharded_params if p.requires_grad)
            self._placeholders.put_zeros(sharded)
        elif self.adds_up:
            self._placeholders.put(
                (handle.sharded_params[index], self._waiting_gradient(handle, index))
                for handle in handles
                for index in handle.gradients.layout.trainable
            )

    def _waiting_gradient(self, handle: FlatParamHandle, index: int) -> WaitingGradient:
        sharded = handle.sharded_params[index]
        if sharded not in self._stand_ins:
            stand_in = WaitingGradient(
                handle.gradients, index, sharded.detach(), self._context.streams
            )
            self._stand_ins[sharded] = stand_in
        return self._stand_ins[sharded]

    def hide(self) -> bool:
        """Have `.grad` be what was reduced; returns whether it showed what is kept."""
        return self._placeholders.take()

    def give_up_if_cleared(self) -> None:
        if self._placeholders.are_cleared(all_of_them=not self.is_skipping):
            self.give_up()

    def give_up(self) -> None:
        """The program begins another step: drop what is kept of this one."""
        self.forget_sums()  # First: then there is nothing to clear parameter by parameter.
        self.hide()
        self._hid_placeholders = False
        self.stop_skipping()

    def before_step(self) -> None:
        """An optimizer steps, and must not take what is kept for gradients."""
        self.give_up_if_cleared()
        self._hid_placeholders = self.hide()

    def after_step(self) -> None:
        self.stop_skipping()
        self._hid_placeholders = False
        self.show()

    def stop_skipping(self) -> None:
        self.is_skipping = self._skips_next = False

    def _add_parts(self, arrived: list[tuple[Reduction, set[int]]]) -> list[Gradient]:
        """Add the gradients of reductions to the delivery, but return those for hooks."""
        plain, hooked = self._delivery.plain, []
        stepped = stepped_by_torch()
        with torch.no_grad():
            for reduction, present in arrived:
                self._context.streams.wait_on_host(reduction.landed)
                gradients, scale = reduction.handle.gradients, reduction.unit.options.gradient_scale
                hooked += gradients.parts(reduction.chunk, present, scale, stepped, plain)
                if reduction.pending is None:
                    # One rank alone: the parts came from the buffer itself.
                    gradients.release()
        return hooked

    def _deliver_and_step(self, arrived: list[tuple[Reduction, set[int]]]) -> None:
        """Deliver one reduction at a time, in the order of issue: the host steps what has arrived
        while the device still computes the rest. Steps cannot be undone."""
        # Each of several nested passes (reentrant checkpoints) may reduce a unit.
        last_of = {reduction.unit: index for index, (reduction, _) in enumerate(arrived)}
        hooked: list[Gradient] = []
        complete: list[Unit] = []
        stepped: list[str] = []
        step = self._step
        assert step is not None, "the optimizer is part of it"
        try:
            for index, (reduction, present) in enumerate(arrived):
                hooked += self._add_parts([(reduction, present)])
                self._delivery.commit()
                if last_of[reduction.unit] == index:
                    complete.append(reduction.unit)
                if not hooked:
                    # Parameters with hooks get their gradients below, together; until then neither
                    # their unit nor a later one is reported.
                    while complete:
                        stepped.append(complete[0].label)
                        step(complete.pop(0))
            if hooked:
                self._delivery.run_hooks(hooked)
            for unit in complete:
                stepped.append(unit.label)
                step(unit)
            step(None)
        except BaseException as error:
            if stepped:
                note_steps(error, stepped)
            raise

    def commit(self, num_micro_batches: int = 1) -> None:
        """The pass is complete, and nothing of it can fail any more: write `.grad`, and the sums of
        micro-batches.

        Args:
            num_micro_batches: 0 if only what waited was reduced.
        """
        self._delivery.commit()
        self.is_skipping = self._skips_next
        if self.num_waiting or not self.requires_sync:
            self._keep_sums()
        self.num_waiting += num_micro_batches
        if self.requires_sync:
            self._end_accumulation()
        self.show()
        if self.agreed is not None:
            self.agreed.commit()

    def _keep_sums(self) -> None:
        """See Note [A pass adds only when it is complete] in gradients.py."""
        buffers = [handle.gradients for unit in self._units for handle in unit.handles]
        pending = [buffer.pending_additions() for buffer in buffers]
        targets = [target for each, _ in pending for target in each]
        if targets:
            # One call for all units: all of the pass counts, or nothing.
            torch._foreach_add_(targets, [source for _, each in pending for source in each])
        for buffer in buffers:
            buffer.keep()
        for kept_micro_batch in self._context.extensions.kept_micro_batch:
            kept_micro_batch()

    def drop(self) -> None:
        """Drop what the pass that failed brought, after waiting for reductions that read it. Sums
        of earlier micro-batches stay: `Unit.reset` returns to them."""
        for each in self._in_flight:
            if each.pending is not None:
                each.pending.wait()
        self._in_flight = []
        self._undelivered = []
        self._skips_next = self.is_skipping
        self._delivery.undo()

    def forget_sums(self) -> None:
        """Drop the sums of earlier micro-batches."""
        for unit in self._units:
            for handle in unit.handles:
                handle.gradients.forget()
        self.num_waiting = 0

    def exchange_presence(
        self, reductions: list[Reduction]
    ) -> Callable[[], list[tuple[Reduction, set[int]]]]:
        """Start exchanging which parameters had a gradient on any rank.

        A parameter that had none anywhere keeps the `.grad` it has, as in plain torch. Only a rank
        that misses a gradient itself reads the result, so ordinary steps do not wait for a device.
        One collective for each group, of one byte per parameter.

        Returns:
            A function that waits, and returns the reductions with the parameters present anywhere.
        """
        if self.agreed is not None and any(self.agreed.concerns(each.unit) for each in reductions):
            return self.agreed.exchange_presence(reductions)
        by_placement: dict[int, list[Reduction]] = {}
        for reduction in reductions:
            if reduction.handle.placement.num_ranks > 1:
                by_placement.setdefault(id(reduction.handle.placement), []).append(reduction)
        started = []
        for members in by_placement.values():
            flags = [
                index in reduction.present
                for reduction in members
                for index in reduction.handle.gradients.layout.trainable
            ]
            own = flags_tensor(flags, self._context.device)
            first, *others = members[0].handle.placement.groups
            started.append((members, all(flags), others, *self._gather_flags(own, first)))

        def answer() -> list[tuple[Reduction, set[int]]]:
            answers = {id(reduction): reduction.present for reduction in reductions}
            for members, has_all, others, table, pending in started:
                pending.wait()
                for group in others:
                    table, pending = self._gather_flags(table.amax(dim=0), group)
                    pending.wait()
                if has_all:
                    continue  # All are present; reading the table would block the host.
                anywhere = iter(table.amax(dim=0).tolist())
                for reduction in members:
                    trainable = reduction.handle.gradients.layout.trainable
                    answers[id(reduction)] = {i for i in trainable if next(anywhere)}
            return [(reduction, answers[id(reduction)]) for reduction in reductions]

        return answer

    def _gather_flags(self, flags: torch.Tensor, group: ShardGroup) -> tuple[torch.Tensor, Pending]:
        operation = self._context.operations.next("gradient presence", "the model", group)
        return gather_flags(flags, group, operation)
