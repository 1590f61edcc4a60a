"""GradientReducer: starts reductions in backward, and writes `.grad` when the pass ends.

One unit's reduction is in flight at a time: it overlaps with the next unit's backward, and its
buffers are freed before the next ones are allocated. Results are held back until the pass has
ended, so that a pass that fails changes no gradient the user can see.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import nn

from layerzero.comm.collectives import Pending, flags_tensor, gather_flags
from layerzero.config import Accumulation
from layerzero.core.groups import ShardGroup
from layerzero.core.parameter_hooks import accumulate_with_hooks
from layerzero.runtime.accumulation import AccumulationCosts, choose_sharded
from layerzero.runtime.context import RuntimeContext
from layerzero.runtime.reduction import Reduction, reduce_unit
from layerzero.runtime.unit import Unit

_logger = logging.getLogger(__name__)


class GradientReducer:
    """Reduces the gradients of units as they are done, and delivers them to `.grad`."""

    requires_sync: bool
    """False inside `no_sync`: gradients accumulate over micro-batches."""
    sums_sharded: bool
    """Whether they accumulate after the first hop of the reduction instead of before it."""

    on_delivered: Callable[[Unit | None], None] | None
    """Called with each unit once its `.grad`s of a backward pass are complete; last with None."""

    def __init__(
        self, context: RuntimeContext, units: Sequence[Unit], accumulation: Accumulation
    ) -> None:
        """`units` is the root's list."""
        self._context = context
        self._units = units
        self.requires_sync = True
        self.sums_sharded = accumulation == "sharded"
        self._is_auto = accumulation == "auto"
        self._num_waiting = 0
        self._num_micro_batches = 2
        self._reason = ""
        self.on_delivered = None
        self._step: Callable[[Unit | None], None] | None = None
        self._watchers: list[weakref.WeakMethod[Callable[[Unit | None], None]]] = []
        self._in_flight: list[Reduction] = []
        self._undelivered: list[Reduction] = []

    def __del__(self) -> None:
        # After an error what is being reduced goes with the model.
        if self.__dict__.get("_in_flight"):
            self._context.before_deletion()

    def set_requires_sync(self, requires_sync: bool) -> None:
        """False: gradients accumulate from now on."""
        self.requires_sync = requires_sync

    def call_on_delivered(self, function: Callable[[Unit | None], None] | None) -> None:
        """Have `function` use up gradients as they are delivered; None: nobody does."""
        self._step = function
        self._join_watchers()

    def watch_delivered(self, method: Callable[[Unit | None], None]) -> None:
        """Call a bound method, as long as its object lives, with each unit that is delivered."""
        self._watchers.append(weakref.WeakMethod(method))
        self._join_watchers()

    def _join_watchers(self) -> None:
        watchers, step = self._watchers, self._step
        if not watchers:
            self.on_delivered = step
            return

        def on_delivered(unit: Unit | None) -> None:
            for reference in watchers:
                watcher = reference()
                if watcher is not None:
                    watcher(unit)
            if step is not None:
                step(unit)

        self.on_delivered = on_delivered

    @property
    def uses_up_gradients(self) -> bool:
        """Whether an optimizer steps while gradients are delivered."""
        return self._step is not None

    def begin_backward(self) -> None:
        """A backward pass of the whole model begins; "auto" decides where gradients accumulate."""
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
        return self._num_waiting > 0

    def end_backward(self) -> None:
        """A backward pass of the whole model is over and delivered."""
        self._num_waiting += 1
        if self.requires_sync:
            self.end_accumulation()

    def end_accumulation(self) -> None:
        """The sum over micro-batches is delivered."""
        if self._num_waiting > 1:
            # "auto" expects as many micro-batches in the next step.
            self._num_micro_batches = self._num_waiting
        self._num_waiting = 0

    def reduce(self, unit: Unit) -> None:
        """Take the unit's gradients, and start the hops that are due; see `reduce_unit`.

        On CPU, blocks the host until earlier reductions are done that must not be in flight beside
        it.
        """
        self._make_room(unit)
        with torch.no_grad(), self._context.profile("reduce", unit.label):
            self._in_flight += reduce_unit(
                self._context, unit, self.requires_sync, self.sums_sharded
            )

    def _make_room(self, unit: Unit) -> None:
        """Complete what must not be in flight beside the unit's reduction: here, all others."""
        self._complete_all()

    def _complete_all(self) -> None:
        """Wait for the reductions in flight and free their input."""
        while self._in_flight:
            self._complete_oldest()

    def _complete_oldest(self) -> None:
        # Removed only when done: after an error `drop` has to wait for it, too.
        reduction = self._in_flight[0]
        if reduction.pending is not None:
            reduction.pending.wait()
            if reduction.is_partial:
                reduction.handle.gradients.release_buffer()
            else:
                reduction.handle.gradients.release()
        if not reduction.is_partial:
            self._undelivered.append(reduction)
        self._in_flight.pop(0)

    def deliver(self) -> None:
        """Wait for the last reductions and write `.grad` of every sharded parameter.

        Collective. Blocks the host on CPU, with offloaded parameters, and where this rank misses a
        gradient.
        """
        last = [*self._undelivered, *(r for r in self._in_flight if not r.is_partial)]
        if not last:
            self._complete_all()
            return
        with torch.no_grad():
            presence = self._exchange_presence(last)
            self._complete_all()
            arrived = presence()
            self._context.before_delivery()
            self._undelivered = []
        # Each of several nested passes (reentrant checkpoints) may reduce a unit.
        last_of = {reduction.unit: index for index, (reduction, _) in enumerate(arrived)}
        hooked: list[tuple[nn.Parameter, torch.Tensor]] = []
        complete: list[Unit] = []
        for index, (reduction, present) in enumerate(arrived):
            # One at a time, in the order of issue: the host can work on what has arrived while the
            # device still computes the rest.
            self._context.streams.wait_on_host(reduction.landed)
            with torch.no_grad():
                scale = reduction.unit.options.gradient_scale
                hooked += reduction.handle.gradients.deliver(reduction.chunk, present, scale)
            if reduction.pending is None:
                # One rank alone: `deliver` took the gradients from the buffer itself.
                reduction.handle.gradients.release()
            if self.on_delivered is not None and last_of[reduction.unit] == index:
                complete.append(reduction.unit)
                if not hooked:
                    # Parameters with hooks get their gradients below, together; until then neither
                    # their unit nor a later one is reported.
                    self.on_delivered(complete.pop())
        if hooked:
            accumulate_with_hooks(hooked)
        if self.on_delivered is not None:
            for unit in complete:
                self.on_delivered(unit)
            self.on_delivered(None)

    def drop(self) -> None:
        """Drop everything that was not delivered, after waiting for reductions that read it."""
        for reduction in self._in_flight:
            if reduction.pending is not None:
                reduction.pending.wait()
        self._in_flight = []
        self._undelivered = []
        self._num_waiting = 0
        self._context.drop_squares()

    def _exchange_presence(
        self, reductions: list[Reduction]
    ) -> Callable[[], list[tuple[Reduction, set[int]]]]:
        """Start exchanging which parameters had a gradient on any rank.

        A parameter that had none anywhere keeps the `.grad` it has, as in plain torch. Only a rank
        that misses a gradient itself reads the result, so ordinary steps do not wait for a device.
        One collective for each group, of one byte per parameter.

        Returns:
            A function that waits, and returns the reductions with the parameters present anywhere.
        """
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
