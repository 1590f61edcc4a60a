"""Learner: measures the first steps of a model, and chooses what its memory budget buys.

    step 1          nothing full: optimizer state is made
    steps 2 to 5    nothing full: the most bytes are noted, by the units that are full at once
    step 6          ranks exchange them, and choose by the highest

A step ends with the first forward after a backward that reduced gradients and an optimizer that
changed weights on any rank. Until the choice is made a forward costs an exchange of two numbers,
and on the CPU every operation runs under a dispatch mode. Afterwards nothing is left of it.
"""

from __future__ import annotations

import json
import logging
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial

import torch

from layerzero.comm.exchanges import Name, gather_along, gather_bytes
from layerzero.comm.gloo.threads import FinishingStream, OnThread
from layerzero.comm.streams import Waitable
from layerzero.config import BackwardPrefetch, GatherBudget
from layerzero.flat.placement import Placement, ShardGroup
from layerzero.memory_budget.choice import Learned, MemoryChoice, Settings
from layerzero.memory_budget.storages import Meter, start_meter
from layerzero.notices import warn_once
from layerzero.step.backward import ForwardPass
from layerzero.step.extension import Extension
from layerzero.step.module_guards import is_compiled
from layerzero.step.root import RootState
from layerzero.step.unit import Unit
from layerzero.verify.verifier import Verifier

_Held = tuple[int, list[tuple[list[int], int]], int, list[int]]
"""Fields of `Learned` on one rank, without `sizes`."""
_logger = logging.getLogger(__name__)
_CHECKSUMS = 4
"""A gather in forward and in backward, a reduction, and a comparison of what rests."""


class Learner(Extension):
    """Begins to hold the memory budget of one model; see `before_forward`."""

    choice: MemoryChoice | None
    """None while it learns."""
    steps = 5
    """Number of steps before the choice."""

    def __init__(self, root: RootState, placement: Placement, budget: int) -> None:
        """Not collective.

        Raises:
            ValueError: the shards alone need more.
        """
        self.choice = None
        self._root_ref = weakref.ref(root)
        self._placement = placement
        self._budget = budget
        self._record: _Record | None = None
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
        elif torch.is_inference_mode_enabled():
            pass  # Its end would bring back that operations are counted, after the last step, too.
        elif self._record.has_reduced and not root.reducer.kept.adds_up:
            peak = self._record.look() + self._slack
            changed, peak = self._highest([int(self._weights_changed()), peak])
            if changed:
                self._end_step(peak)
            if self._num_steps == self.steps:
                own = self._record.held()
                self._stop()
                self._choose(self._everyones(own))
                root.extensions.remove(self)

    def begin_action(self, action: str, unit: str) -> None:
        if self._record is not None and action in ("unshard", "reduce"):
            self._record.note(action, unit)

    def end_action(self, action: str, unit: str) -> None:
        if self._record is not None and action == "reshard":
            self._record.note(action, unit)

    def _start(self) -> None:
        root = self._root
        self._refuse_compiled(root)
        meter = self._start_meter(root)
        # The model may go while it learns.
        self._stops = weakref.finalize(root, meter.stop)
        self._record = _Record(meter, root)
        self._usual = root.streams.reduce
        if isinstance(self._usual, FinishingStream):
            root.streams.reduce = LateStream()
        self._versions = _versions(root)

    def _start_meter(self, root: RootState) -> Meter:
        return start_meter(root.device, root.units[0].module)

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
        self._num_steps += 1
        # The first one made the optimizer's state, and found batches that no step had touched.
        self._record.end_step(is_learned=self._num_steps > 1)
        if self._num_steps > 1 and peak > self._budget:
            self._stop()
            self._refuse(_too_small(self._budget, peak))

    def _refuse(self, text: str) -> None:
        self._refusal = text
        raise RuntimeError(text)

    def _refuse_compiled(self, root: RootState) -> None:
        if root.device.type == "cpu" and any(map(is_compiled, root.units[0].module.modules())):
            raise ValueError(
                "memory_budget: memory that a compiled module allocates on the CPU cannot be "
                "measured; leave out memory_budget or torch.compile"
            )

    def _refuse_without_steps(self, root: RootState) -> None:
        self._refuse_compiled(root)
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

    def _choose(self, everyones: Sequence[_Held]) -> None:
        root = self._root
        for unit in root.units:
            if unit.forward_prefetch is not None or unit.backward_prefetch is not None:
                self._refuse(
                    f"{unit.label}: memory_budget chooses what is prefetched; set no list of "
                    "modules to prefetch"
                )
        inside: dict[frozenset[int], int] = {}
        for _, held, _, _ in everyones:
            for full, peak in held:
                units = frozenset(full)
                inside[units] = max(inside.get(units, 0), peak + self._slack)
        fewest = zip(*(saved for _, _, _, saved in everyones), strict=True)
        sizes = tuple(unit.nbytes for unit in root.units)
        learned = Learned(
            outside=max(outside for outside, *_ in everyones) + self._slack,
            inside=inside,
            ahead=max(ahead for _, _, ahead, _ in everyones),
            sizes=sizes,
            # A unit that only some ranks run has another place in the step of each rank.
            saved=tuple(
                0 if unit.is_optional else min(each)
                for unit, each in zip(root.units, fewest, strict=True)
            ),
        )
        settings = learned.choose(self._budget)
        _apply(root, settings)
        self.choice = MemoryChoice(
            budget_bytes=self._budget,
            bound_bytes=learned.bound(settings),
            least_bytes=learned.bound(Settings()),
            most_bytes=max(map(learned.bound, learned.ladder())),
            kept=tuple(root.units[index].fqn for index in sorted(settings.kept)),
            forward_prefetch=settings.forward_depth,
            backward_prefetch=root.scheduler.backward_prefetch,
            saved_bytes=sum(sizes[unit] * learned.saved[unit] for unit in settings.kept),
        )
        if self._placement.is_first:
            _logger.info("%s", self.choice)

    def _highest(self, numbers: Sequence[int]) -> list[int]:
        """The highest of all ranks, for each number. Collective; blocks the host."""
        table = torch.tensor(numbers, dtype=torch.int64, device=self._root.device)
        table = gather_along(table, *self._everyone())
        return [int(number) for number in table.view(-1, len(numbers)).amax(0).tolist()]

    def _everyones(self, own: _Held) -> list[_Held]:
        """What each rank held. Collective; blocks the host."""
        found = gather_bytes(json.dumps(own).encode(), *self._everyone(), self._root.device)
        return [json.loads(each) for each in found]

    def _everyone(self) -> tuple[list[ShardGroup], Name]:
        """The groups that connect all ranks of the model, and how exchanges over them are named."""
        groups = [*self._placement.groups, *self._root.tensor_parallel_groups]
        return groups, partial(self._root.operations.next, "memory budget", "the model")


class _Record:
    """The steps so far: the most bytes in their passes and outside of them, and their gathers."""

    has_reduced: bool
    """Whether the step that runs has."""

    def __init__(self, meter: Meter, root: RootState) -> None:
        self._meter = meter
        self._sizes = [unit.nbytes for unit in root.units]
        self._units = {unit.label: unit.index for unit in root.units}
        self._context = weakref.proxy(root.context)
        self._full: frozenset[int] = frozenset()
        """The units that are full now."""
        self._inside: dict[frozenset[int], int] = {}
        """The most bytes in passes, by the units that were full."""
        self._outside = self._ahead = self._peak = self._since = 0
        self._saved: list[int] = []
        self._begin()

    def _begin(self) -> None:
        self.has_reduced = False
        self._peak = self._since = 0
        self._was_in_backward: bool | None = None
        """Whether the last gather was; None before the first."""
        self._gathers: Counter[tuple[int, bool]] = Counter()

    def note(self, action: str, label: str) -> None:
        """A gather or reduction begins, or a unit was freed."""
        self.look()
        if self._gathers:
            self._inside[self._full] = max(self._inside.get(self._full, 0), self._since)
        else:
            self._outside = max(self._outside, self._since)
        self._since = 0
        self.has_reduced |= action == "reduce"
        unit = self._units[label]
        if action == "reshard":
            self._full -= {unit}
        elif action == "unshard":
            self._full |= {unit}
            in_backward = self._context.in_backward
            if in_backward == self._was_in_backward:  # The first one of a pass is never ahead.
                self._ahead = max(self._ahead, self._sizes[unit])
            self._was_in_backward = in_backward
            self._gathers[unit, in_backward] += 1

    def look(self) -> int:
        """The most bytes since the step began."""
        self._since = max(self._since, self._meter.look())
        self._peak = max(self._peak, self._since)
        return self._peak

    def end_step(self, is_learned: bool) -> None:
        """A step has ended, and the next one begins. `is_learned`: False: forget it."""
        units, gathers = range(len(self._sizes)), self._gathers
        if is_learned:
            saved = [min(gathers[unit, False], gathers[unit, True]) for unit in units]
            self._saved = list(map(min, self._saved or saved, saved))
            self._outside = max(self._outside, self._since)
        else:
            self._inside.clear()
            self._outside = self._ahead = 0
        self._begin()

    def held(self) -> _Held:
        inside = [([*full], peak) for full, peak in self._inside.items()]
        return self._outside, inside, self._ahead, self._saved


class LateStream(FinishingStream):
    """Runs its work on the thread that waits for it, after all that was enqueued before.

    The thread of gloo's reduce stream frees what a reduction held some time after its data has
    come. What a step holds at most differs by that from run to run; a budget must hold for the
    latest time.
    """

    def __init__(self) -> None:
        super().__init__()
        self._late: deque[OnThread] = deque()

    def _enqueue(self, work: Callable[[], Waitable | None]) -> Waitable:
        self._last = _Late(work, self._late)
        self._late.append(self._last)
        return self._last


class _Late(OnThread):
    def __init__(self, work: Callable[[], Waitable | None], queue: deque[OnThread]) -> None:
        super().__init__(work, threading.current_thread())
        self._before = queue

    def wait(self) -> None:
        while not self.is_done:
            self._before.popleft().run()
        super().wait()


def _apply(root: RootState, settings: Settings) -> None:
    for unit in root.units:
        unit.set_options(reshard_after_forward=unit.index not in settings.kept)
    scheduler, in_backward = root.scheduler, settings.prefetches_in_backward
    scheduler.forward_depth = settings.forward_depth
    scheduler.backward_prefetch = BackwardPrefetch.BACKWARD_PRE if in_backward else None
    scheduler.recorder.forget()  # Units may stay full that did not.
    # It would count units that are kept; the choice bounds what is ahead.
    root.context.limiter.set_budget(GatherBudget())


def _versions(root: RootState) -> list[list[int]]:
    return [handle.versions for unit in root.units for handle in unit.handles]


def _checksums(root: RootState) -> int:
    """Bytes of checksums that `verify` may hold: those of a learned step are not those of all."""
    if not root.extensions.of(Verifier):
        return 0
    groups = [g for unit in root.units for h in unit.handles for g in h.placement.all_groups]
    return sum(_CHECKSUMS * 8 * (group.size + 2) for group in groups)


def _too_small(budget: int, least: int) -> str:
    return f"memory_budget: {budget:,} bytes are too few: a step needs at least {least:,} bytes"
