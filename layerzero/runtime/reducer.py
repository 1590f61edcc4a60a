"""GradientReducer: reductions under way, and their delivery at the end of the backward pass.

One reduction is in flight at a time: it travels while the next unit computes, and its buffers are
free before the next ones are needed. Results wait until the pass has ended, so that a pass that
fails changes no gradient the user can see.
"""

from __future__ import annotations

import logging
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
    """Takes gradients of units as they are done, gives them to the sharded parameters."""

    requires_sync: bool
    """False inside `no_sync`: gradients add up over micro-batches."""
    sums_sharded: bool
    """Whether they add up after the first hop of the reduction, and not before it."""

    on_delivered: Callable[[Unit | None], None] | None
    """Called with each unit whose pieces have all gradients of a backward pass; then with None."""

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
        self._in_flight: list[Reduction] = []
        self._undelivered: list[Reduction] = []

    def set_requires_sync(self, requires_sync: bool) -> None:
        """False: gradients add up from now on."""
        self.requires_sync = requires_sync

    def call_on_delivered(self, function: Callable[[Unit | None], None] | None) -> None:
        """From now on; see `on_delivered`."""
        self.on_delivered = function

    def begin_backward(self) -> None:
        """A backward pass of the whole model begins; "auto" decides where its sum goes."""
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
        """Whether micro-batches wait; the same on every rank that runs the same passes."""
        return self._num_waiting > 0

    def end_backward(self) -> None:
        """A backward pass of the whole model is over and delivered."""
        self._num_waiting += 1
        if self.requires_sync:
            self.end_accumulation()

    def end_accumulation(self) -> None:
        """The sum over micro-batches is delivered."""
        if self._num_waiting > 1:
            self._num_micro_batches = self._num_waiting
        self._num_waiting = 0

    def reduce(self, unit: Unit) -> None:
        """Take the unit's gradients, and start reducing them as far as they are to be reduced."""
        self._complete_all()
        with torch.no_grad(), self._context.profile("reduce", unit.label):
            self._in_flight += reduce_unit(
                self._context, unit, self.requires_sync, self.sums_sharded
            )

    def _complete_all(self) -> None:
        """Wait for what is in flight and free its input."""
        while self._in_flight:
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
        """Wait for the last reductions and give every sharded parameter its gradient."""
        last = [*self._undelivered, *(r for r in self._in_flight if not r.is_partial)]
        if not last:
            self._complete_all()
            return
        with torch.no_grad():
            presence = self._exchange_presence(last)
            self._complete_all()
            arrived = presence()
            self._undelivered = []
        # A unit reached by nested passes (reentrant checkpoints) is reduced in each of them.
        last_of = {reduction.unit: index for index, (reduction, _) in enumerate(arrived)}
        hooked: list[tuple[nn.Parameter, torch.Tensor]] = []
        complete: list[Unit] = []
        for index, (reduction, present) in enumerate(arrived):
            # One after the other, in the order of issue: the host may work on what has landed
            # while the device still computes the rest.
            self._context.streams.wait_on_host(reduction.landed)
            with torch.no_grad():
                scale = reduction.unit.options.gradient_scale
                hooked += reduction.handle.gradients.deliver(reduction.chunk, present, scale)
            if reduction.pending is None:
                reduction.handle.gradients.release()
            if self.on_delivered is not None and last_of[reduction.unit] == index:
                complete.append(reduction.unit)
                if not hooked:
                    self.on_delivered(complete.pop())
        if hooked:
            accumulate_with_hooks(hooked)
        if self.on_delivered is not None:
            for unit in complete:
                self.on_delivered(unit)
            self.on_delivered(None)

    def drop(self) -> None:
        """Forget everything that was not delivered, once nobody reads the buffers any more."""
        for reduction in self._in_flight:
            if reduction.pending is not None:
                reduction.pending.wait()
        self._in_flight = []
        self._undelivered = []
        self._num_waiting = 0

    def _exchange_presence(
        self, reductions: list[Reduction]
    ) -> Callable[[], list[tuple[Reduction, set[int]]]]:
        """Start asking which parameters had a gradient on any rank; call the result for the answer.

        A parameter that had none anywhere keeps the `.grad` it has, as in plain torch. Only a rank
        that misses a gradient itself has to read the answer, so a device is not waited for in
        ordinary steps. One collective of a byte per parameter for each group.
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
            started.append((members, all(flags), others, *self._ask(own, first)))

        def answer() -> list[tuple[Reduction, set[int]]]:
            answers = {id(reduction): reduction.present for reduction in reductions}
            for members, has_all, others, table, pending in started:
                pending.wait()
                for group in others:
                    table, pending = self._ask(table.amax(dim=0), group)
                    pending.wait()
                if has_all:
                    continue
                anywhere = iter(table.amax(dim=0).tolist())
                for reduction in members:
                    trainable = reduction.handle.gradients.layout.trainable
                    answers[id(reduction)] = {i for i in trainable if next(anywhere)}
            return [(reduction, answers[id(reduction)]) for reduction in reductions]

        return answer

    def _ask(self, flags: torch.Tensor, group: ShardGroup) -> tuple[torch.Tensor, Pending]:
        operation = self._context.operations.next("gradient presence", "the model", group)
        return gather_flags(flags, group, operation)
