"""Learner: measures the first steps of a model, and chooses what its memory budget buys.

    step 1          nothing full: optimizer state is made
    steps 2 to 5    nothing full: the most bytes between any two gathers or frees are noted
    step 6          ranks agree on the highest of them, and choose

A step ends with the first forward after a backward that reduced gradients and an optimizer that
changed weights on any rank. Until the choice is made a forward costs an exchange of two numbers,
and on the CPU every operation runs under a dispatch mode. Afterwards nothing is left of it.
"""

from __future__ import annotations

import hashlib
import logging
import weakref
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import torch

from layerzero.comm.exchanges import gather_along
from layerzero.comm.gloo.threads import FinishingStream
from layerzero.config import BackwardPrefetch, GatherBudget
from layerzero.flat.placement import Placement
from layerzero.memory_budget.choice import Costs, MemoryChoice, choose, ladder
from layerzero.memory_budget.meter import LateStream, Meter, make_meter
from layerzero.memory_budget.timeline import Event, Settings, Timeline
from layerzero.notices import warn_once
from layerzero.ops import Segments
from layerzero.step.backward import ForwardPass
from layerzero.step.extension import Extension
from layerzero.step.root import RootState
from layerzero.step.unit import Unit
from layerzero.verify.verifier import Verifier

_logger = logging.getLogger(__name__)
_CHECKSUMS = 4
"""A gather in forward and in backward, a reduction, and a comparison of what rests."""


class Learner(Extension):
    """Begins to hold the memory budget of one model; see `before_forward`."""

    choice: MemoryChoice | None
    """None while it learns."""
    steps = 5
    """Number of steps before the choice."""

    def __init__(
        self, root: RootState, placement: Placement, budget: int, meter: Meter | None = None
    ) -> None:
        """Not collective.

        Args:
            meter: None: what measures on the model's device.

        Raises:
            ValueError: the shards alone need more.
            NotImplementedError: the device does not report its live memory.
        """
        self.choice = None
        self._root_ref = weakref.ref(root)
        self._placement = placement
        self._budget = budget
        self._meter = meter or make_meter(root.device)
        self._record: _Record | None = None
        self._steps: list[Timeline] = []
        self._num_steps = 0
        self._versions: list[list[int]] = []
        self._refusal = ""
        self._slack = _checksums(root)
        self._refuse_without_steps(root)
        _apply(root, Settings())
        if root.reducer.accumulation.may_decide:
            root.reducer.accumulation.decide(sharded=True)  # Which holds the least.
        root.extensions.add(self)

    @property
    def _root(self) -> RootState:
        root = self._root_ref()
        assert root is not None, "it calls this"
        return root

    def before_forward(self, unit: Unit, forward_pass: ForwardPass) -> None:
        """A forward of the model begins. Collective; blocks the host.

        Raises:
            RuntimeError: on every rank: the budget is less than a step needs.
        """
        if self._refusal:
            raise RuntimeError(self._refusal)
        root = self._root
        if root.join is not None:
            warn_once(
                "memory_budget: steps inside layerzero.join are not measured; nothing stays full "
                "between forward and backward before five steps outside are",
                is_first=self._placement.is_first,
            )
        elif self._record is None:
            if torch.is_grad_enabled():
                self._start()
        elif self._record.has_reduced and not root.reducer.kept.adds_up:
            peak = self._record.look() + self._slack
            changed, peak = self._highest([int(self._weights_changed()), peak])
            if changed:
                self._end_step(peak)
            if self._num_steps == self.steps:
                self._stop()
                self._choose()
                root.extensions.remove(self)

    def begin_action(self, action: str, unit: str) -> None:
        if self._record is not None and action in ("unshard", "reduce"):
            self._record.note(action, unit)

    def end_action(self, action: str, unit: str) -> None:
        if self._record is not None and action == "reshard":
            self._record.note(action, unit)

    # Measuring --------------------------------------------------------------------------------

    def _start(self) -> None:
        root = self._root
        if root.device.type == "cpu" and any(_is_compiled(unit) for unit in root.units):
            self._refuse(
                "memory_budget: memory that a compiled module allocates on the CPU cannot be "
                "measured; leave out memory_budget or torch.compile"
            )
        self._meter.start(_held_by_engine(root))
        # The model may go while it learns.
        self._stops = weakref.finalize(root, self._meter.stop)
        numbers = {unit.label: unit.index for unit in root.units}
        self._record = _Record(self._meter, numbers, root)
        self._usual = root.streams.reduce
        if isinstance(self._usual, FinishingStream):
            root.streams.reduce = LateStream()
        self._versions = _versions(root)

    def _stop(self) -> None:
        root = self._root
        self._stops()
        root.streams.reduce = self._usual
        self._record = None

    def _weights_changed(self) -> bool:
        before, self._versions = self._versions, _versions(self._root)
        return before != self._versions

    def _end_step(self, peak: int) -> None:
        assert self._record is not None, "called after a step"
        timeline = self._record.take()
        self._num_steps += 1
        if self._num_steps == 1:
            return  # It made the optimizer's state, and found batches that no step had touched.
        self._steps.append(timeline)
        if peak > self._budget:
            self._stop()
            self._refuse(_too_small(self._budget, peak))

    def _refuse(self, text: str) -> None:
        self._refusal = text
        raise RuntimeError(text)

    def _refuse_without_steps(self, root: RootState) -> None:
        for unit in root.units:
            if unit.options.reshard_after_forward is not True:
                raise ValueError(
                    f"{unit.label}: has a reshard_after_forward of its own, which memory_budget "
                    "chooses; leave one of them out"
                )
        least = sum(h.main_shard.nbytes for unit in root.units for h in unit.handles)
        least += max(unit.nbytes for unit in root.units)
        if least > self._budget:
            raise ValueError(
                f"{_too_small(self._budget, least)} for the shards and its largest unit alone"
            )

    # Choosing ---------------------------------------------------------------------------------

    def _choose(self) -> None:
        root = self._root
        for unit in root.units:
            if unit.forward_prefetch is not None or unit.backward_prefetch is not None:
                self._refuse(
                    f"{unit.label}: memory_budget chooses what is prefetched; set no list of "
                    "modules to prefetch"
                )
        timeline = self._agreed(Timeline.highest(self._steps))
        self._steps = []
        costs = self._costs()
        settings = choose(timeline, costs, self._budget)
        _apply(root, settings)
        self.choice = self._described(timeline, costs, settings)
        if self._placement.is_first:
            _logger.info("%s", self.choice)

    def _agreed(self, timeline: Timeline) -> Timeline:
        """The highest bytes of all ranks; in one segment if their steps differ."""
        text = repr((timeline.events, timeline.is_whole)).encode()
        digest = hashlib.blake2b(text, digest_size=7).digest()
        number = int.from_bytes(digest, "big")
        highest, lowest = self._highest([number, -number])
        if highest != -lowest:
            timeline = timeline.in_one_segment()
        return timeline.with_peaks(self._highest([each + self._slack for each in timeline.peaks]))

    def _highest(self, numbers: Sequence[int]) -> list[int]:
        """The highest of all ranks, for each number. Collective; blocks the host."""
        root, what = self._root, ("memory budget", "the model")
        table = torch.tensor(numbers, dtype=torch.int64, device=root.device)
        table = gather_along(table, self._placement.groups, partial(root.operations.next, *what))
        name = partial(root.operations.next_tensor_parallel, *what)
        table = gather_along(table, root.tensor_parallel_groups, name)
        return [int(number) for number in table.view(-1, len(numbers)).amax(0).tolist()]

    def _costs(self) -> Costs:
        root = self._root
        sizes = [unit.nbytes for unit in root.units]
        # A unit that only some ranks run has another place in the step of each rank.
        return Costs(sizes, frozenset(unit.index for unit in root.units if unit.is_optional))

    def _described(self, timeline: Timeline, costs: Costs, settings: Settings) -> MemoryChoice:
        root = self._root
        *_, last = ladder(timeline, costs)
        gathers = {unit: timeline.gathers[unit] for unit in settings.kept}
        return MemoryChoice(
            budget_bytes=self._budget,
            bound_bytes=timeline.bound(settings, costs.sizes),
            least_bytes=timeline.peak,
            most_bytes=timeline.bound(last, costs.sizes),
            kept=tuple(root.units[index].fqn for index in sorted(settings.kept)),
            forward_prefetch=settings.forward_depth,
            backward_prefetch=root.scheduler.backward_prefetch,
            saved_bytes=sum(costs.sizes[unit] * number for unit, number in gathers.items()),
        )


class _Record:
    """The events of the step that runs, and the most bytes before each."""

    def __init__(self, meter: Meter, numbers: dict[str, int], root: RootState) -> None:
        self._meter = meter
        self._numbers = numbers
        self._context = weakref.proxy(root.context)
        self._events: list[Event] = []
        self._peaks: list[int] = [0]

    @property
    def has_reduced(self) -> bool:
        return any(event.action == "reduce" for event in self._events)

    def note(self, action: str, label: str) -> None:
        self.look()
        self._events.append(Event(action, self._numbers[label], self._context.in_backward))
        self._peaks.append(0)

    def look(self) -> int:
        """The most bytes since the step began."""
        self._peaks[-1] = max(self._peaks[-1], self._meter.look())
        return max(self._peaks)

    def take(self) -> Timeline:
        """The step that has ended; the next one begins."""
        taken = Timeline.of(self._events, self._peaks)
        self._events, self._peaks = [], [0]
        return taken


def _apply(root: RootState, settings: Settings) -> None:
    for unit in root.units:
        unit.set_options(reshard_after_forward=unit.index not in settings.kept)
    scheduler, in_backward = root.scheduler, settings.prefetches_in_backward
    scheduler.forward_depth = settings.forward_depth
    scheduler.backward_prefetch = BackwardPrefetch.BACKWARD_PRE if in_backward else None
    scheduler.recorder.forget()  # Units may stay full that did not.
    # It would count units that are kept; the choice bounds what is ahead.
    root.context.limiter.budget = GatherBudget()


def _versions(root: RootState) -> list[list[int]]:
    return [handle.versions for unit in root.units for handle in unit.handles]


def _held_by_engine(root: RootState) -> Iterator[torch.Tensor]:
    for unit in root.units:
        for handle in unit.handles:
            gradients = handle.gradients
            yield from (handle.main_shard, handle.compute_shard, handle.full)
            yield from gradients.buffers
            tables = () if gradients.pair is None else gradients.pair.tables
            fields = (*vars(handle).values(), *vars(gradients).values(), *tables)
            yield from (each.table for each in fields if isinstance(each, Segments))
    yield from root.units[0].module.buffers()
    yield from root.units[0].module.parameters()


def _checksums(root: RootState) -> int:
    """Bytes of checksums that `verify` may hold: those of a learned step are not those of all."""
    if not root.extensions.of(Verifier):
        return 0
    groups = [g for unit in root.units for h in unit.handles for g in h.placement.all_groups]
    return sum(_CHECKSUMS * 8 * (group.size + 2) for group in groups)


def _is_compiled(unit: Unit) -> bool:
    inside: Iterable[torch.nn.Module] = unit.module.modules()
    return any(inner._compiled_call_impl is not None for inner in inside)


def _too_small(budget: int, least: int) -> str:
    return f"memory_budget: {budget:,} bytes are too few: a step needs at least {least:,} bytes"
