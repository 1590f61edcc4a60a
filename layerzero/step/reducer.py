"""GradientReducer: starts reductions in backward, and writes `.grad` when the pass ends.

One unit's reduction is in flight at a time: it overlaps with the next unit's backward, and its
buffers are freed before the next ones are allocated. With `ReductionPolicy.in_flight` there are
several, bounded by bytes: each has more than one unit's backward to travel in, for the price of the
gradients that it reads. Results are held back until the pass has ended, so that a pass that fails
changes no gradient the user can see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from layerzero.comm.streams import NOTHING
from layerzero.flat.gradients import Gradient
from layerzero.flat.parameter_hooks import accumulate_with_hooks
from layerzero.step.context import RuntimeContext
from layerzero.step.kept_step import KeptStep, whole_sums_fit
from layerzero.step.presence import exchange_presence
from layerzero.step.reduction import Reduction, reduce_unit
from layerzero.step.unit import Unit

Part = tuple[Unit, Callable[[], list[Gradient]]]
"""A unit, and what adds a reduction of it to the delivery and returns its gradients for hooks."""


class GradientReducer:
    """Reduces the gradients of units as they are done, and delivers them to `.grad`."""

    requires_sync = True
    """False inside `no_sync`: gradients accumulate over micro-batches."""
    sums_sharded: bool
    """Whether micro-batches add up after the first hop of their reduction, not before it."""
    chooses_sums: bool
    """Whether the engine chooses that (`accumulation="auto"`)."""
    kept: KeptStep
    """State of a step that it keeps until the program gives the step up."""
    unit_flags: Mapping[Unit, tuple[bool, bool]]
    """Units that differ from the model: whether gradients accumulate though `requires_sync` is set,
    and `sums_sharded`. The same on every rank."""

    def __init__(
        self, context: RuntimeContext, units: Sequence[Unit], accumulation: str, max_nbytes: int
    ) -> None:
        """`units` is the root's list; `max_nbytes` bounds what is in flight, 0: one unit's."""
        self._max_in_flight_nbytes = max_nbytes
        self._context = context
        self._units = units
        self.sums_sharded, self.chooses_sums = accumulation == "sharded", accumulation == "auto"
        self.kept = KeptStep(units)
        self.unit_flags = {}
        self._in_flight: list[Reduction] = []
        self._undelivered: list[Reduction] = []
        self.exchange_presence: Callable[..., Any] = partial(exchange_presence, context)
        self._delivery = Delivery()

    def __del__(self) -> None:
        # After an error, reductions in flight are deleted with the model.
        if self.__dict__.get("_in_flight"):
            self._context.before_deletion()

    @contextmanager
    def syncing(self, requires_sync: bool) -> Iterator[None]:
        """A context in which `requires_sync` has this value."""
        before, self.requires_sync = self.requires_sync, requires_sync
        try:
            yield
        finally:
            self.requires_sync = before

    def hops_of(self, unit: Unit) -> tuple[bool, bool]:
        """Whether this pass completes the unit's sum, so that all hops run; and whether sums of
        micro-batches wait after the first hop."""
        waits, sums_sharded = self.unit_flags.get(unit, (False, self.sums_sharded))
        return self.requires_sync and not waits, sums_sharded

    def begin_backward(self) -> None:
        """A backward pass of the whole model begins."""
        if self.chooses_sums and not self.requires_sync and not self.kept.adds_up:
            # The first micro-batch of several: the others must add up in the same place.
            handles = [handle for unit in self._units for handle in unit.handles]
            room = self._context.limiter.budget.max_nbytes
            self.sums_sharded = not whole_sums_fit(handles, room)

    def reduce(self, unit: Unit) -> None:
        """Take the unit's gradients, and start the hops that are due; see `reduce_unit`.

        On CPU, blocks the host until reductions that must not be in flight beside it are done.
        """
        if torch.is_grad_enabled():  # As a pass ends, and in one that makes a graph.
            return torch.no_grad()(self.reduce)(unit)
        for before_reduction in self._context.extensions.before_reduction:
            if not before_reduction(unit):
                return None
        on_main = self._context.streams.on_main(unit.used_on)
        # Gradients that other streams own live until these come after their packing.
        _keepalive = on_main is not NOTHING and [
            unsharded.grad for each in unit.handles for unsharded in each.unsharded_params
        ]
        with self._context.profile("reduce", unit.label), on_main:
            # Complete the oldest, until the others may be in flight beside the unit's.
            while self._in_flight and not self._fits(unit):
                self._complete_oldest()
            hops = self.requires_sync, self.sums_sharded
            if self.unit_flags:
                hops = self.hops_of(unit)
            self._in_flight += reduce_unit(self._context, unit, *hops)

    def _fits(self, unit: Unit) -> bool:
        if not self._max_in_flight_nbytes:
            return False
        # A unit's gradients have one buffer. It may be reduced twice in a pass (reentrant
        # checkpoints), and then the first reduction still reads it.
        if any(reduction.unit is unit for reduction in self._in_flight):
            return False
        handles = [reduction.handle for reduction in self._in_flight] + unit.handles
        return sum(h.gradients.in_flight_nbytes for h in handles) <= self._max_in_flight_nbytes

    def _complete_oldest(self) -> None:
        # Removed only when done: after an error `drop` has to wait for it, too.
        reduction = self._in_flight[0]
        with self._context.profile("wait_for_reduce", reduction.unit.label):
            reduction.pending.wait()
        gradients = reduction.handle.gradients
        (gradients.release_buffer if reduction.is_partial else gradients.release)()
        if not reduction.is_partial:
            self._undelivered.append(reduction)
        self._in_flight.pop(0)

    def deliver(self) -> None:
        """Wait for the last reductions, and prepare `commit`; run hooks of sharded parameters.

        Collective. Blocks the host on CPU, with offloaded parameters, and if a gradient is missing.
        """
        last, extensions, presence = self.undelivered(), self._context.extensions, None
        with torch.no_grad():
            for exchange in (*extensions.exchange_presence, self.exchange_presence) if last else ():
                presence = presence or exchange(last)
            while self._in_flight:
                self._complete_oldest()
            if presence is None:
                return
            with self._context.profile("wait_for_presence", "model"):
                arrived = presence()
            judges = extensions.before_write
            drops = [before_write([each for each, _ in arrived]) for before_write in judges]
            self._undelivered = []
        if any(drops) or self.kept.is_skipping:
            sharded = (p for unit in self._units for p in unit.sharded_params)
            root: Any = self._context.owner()
            self._delivery.clear([*sharded, *root.kept_whole])
            return
        if extensions.deliver and any(present for _, present in arrived):
            parts = [(each.unit, partial(self._add_parts, [(each, p)])) for each, p in arrived]
            return extensions.deliver[0](self._delivery, parts)
        if hooked := self._add_parts(arrived):
            self._delivery.run_hooks(hooked)

    def undelivered(self) -> list[Reduction]:
        """Reductions of the pass whose gradients a delivery writes, in order of issue."""
        return [*self._undelivered, *[r for r in self._in_flight if not r.is_partial]]

    def _add_parts(self, arrived: list[tuple[Reduction, set[int]]]) -> list[Gradient]:
        """Add the gradients of reductions to the delivery, but return those for hooks."""
        plain, hooked = self._delivery.plain, []
        with torch.no_grad():
            for reduction, present in arrived:
                self._context.streams.wait_on_host(reduction.landed)
                hooked += reduction.handle.gradients.parts(reduction.chunk, present, plain)
        return hooked

    def commit(self) -> None:
        """The pass is complete, and nothing of it can fail any more: write `.grad`, and the sums of
        micro-batches."""
        was_dropped = bool(self._delivery.cleared)
        self._delivery.commit()
        waiting: Sequence[Unit] = ()
        if self.unit_flags or not self.requires_sync:
            waiting = [unit for unit in self._units if not self.hops_of(unit)[0]]
        if self.kept.adds_up or waiting:
            self._keep_sums()
        self.kept.end_pass(waiting, was_dropped)

    def _keep_sums(self) -> None:
        """See Note [A pass adds only when it is complete] in gradient_sums.py."""
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
            each.pending.wait()
        self._in_flight = []
        self._undelivered = []
        self._delivery.undo()


class Delivery:
    """The gradients of one pass, on their way to `.grad`."""

    plain: list[Gradient]
    """Gradients that `commit` writes."""

    def __init__(self) -> None:
        self.plain = []
        self._written: list[tuple[nn.Parameter, torch.Tensor | None, torch.Tensor | None]] = []
        """Parameters written early, each with its `.grad` before, and a copy of that."""
        self.cleared: list[nn.Parameter] = []
        """Parameters of a pass that is dropped: `commit` only sets their `.grad` to None."""

    def run_hooks(self, hooked: Sequence[Gradient]) -> None:
        """Write the gradients that were added, then those of parameters with hooks, and run these.

        Hooks see all gradients, and may raise. So what is written first is copied, for `undo`.
        """
        for parameter, _ in (*self.plain, *hooked):
            before = parameter.grad
            copied = None if before is None else before.detach().clone()
            self._written.append((parameter, before, copied))
        self._write()
        accumulate_with_hooks(hooked)

    def clear(self, parameters: Iterable[nn.Parameter]) -> None:
        """Write nothing but None, to `.grad` of these parameters."""
        self.plain = []
        self.cleared = [*parameters]

    def commit(self) -> None:
        self._write()
        self._written = []
        cleared, self.cleared = self.cleared, []
        for parameter in cleared:
            parameter.grad = None

    def _write(self) -> None:
        plain, self.plain = self.plain, []
        with torch.no_grad():
            for parameter, gradient in plain:
                if (before := parameter.grad) is None:
                    parameter.grad = gradient
                else:
                    before.add_(gradient)

    def undo(self) -> None:
        """Return `.grad` to what it was, unless `commit` was called."""
        self.plain, self.cleared = [], []
        for parameter, before, copied in reversed(self._written):
            parameter.grad = before
            if before is not None and copied is not None:
                with torch.no_grad():
                    before.copy_(copied)
        self._written = []
