"""Learner: measures the first steps of a model, and chooses what its memory budget buys.

    step 1          nothing full: optimizer state is made
    steps 2 to 5    nothing full: the most bytes are noted, inside and outside of the passes
    step 6          ranks exchange them, and choose by the highest

A step ends with the first forward after a backward that reduced gradients and an optimizer that
changed weights on any rank. Until the choice is made a forward costs an exchange of two numbers,
and on the CPU every operation runs under a dispatch mode. Afterwards nothing is left of it.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from layerzero.build.arguments import Arguments
from layerzero.comm.exchanges import gather_along
from layerzero.comm.gloo.threads import FinishingStream
from layerzero.config import BackwardPrefetch, GatherBudget
from layerzero.memory_budget.storages import Meter, start_meter
from layerzero.notices import some
from layerzero.step.backward import ForwardPass
from layerzero.step.extension import Extension
from layerzero.step.methods import is_compiled
from layerzero.step.root import RootState
from layerzero.step.unit import Unit

_logger = logging.getLogger(__name__)
_STEPS = 5
"""Number of steps before the choice."""
_CHOSEN_FOR_A_BUDGET = {
    "arena": False,  # It keeps the memory of orders that a budget has changed.
    "reshard_after_forward": True,
    "forward_prefetch": True,
    "backward_prefetch": BackwardPrefetch.BACKWARD_PRE,
    "limit_all_gathers": True,
}
"""Arguments in whose place a memory budget chooses, and their defaults."""


@dataclass(frozen=True, kw_only=True)
class MemoryChoice:
    """What was chosen for a budget; the same on every rank."""

    budget_bytes: int
    bound_bytes: int
    """The most that a step like the learned ones can hold with this choice, on the fullest rank."""
    least_bytes: int
    """The most that the learned steps held, which kept nothing full."""
    most_bytes: int
    """From this budget on, a larger one changes nothing."""
    kept: tuple[str, ...]
    """Names of the units that stay full between forward and backward; the root is ""."""
    forward_prefetch: int
    """Number of units that forward gathers ahead."""
    backward_prefetch: BackwardPrefetch | None

    def __str__(self) -> str:
        names = [name or "the root unit" for name in self.kept]
        listed = f" ({some(names)})" if names else ""
        ahead = 0 if self.backward_prefetch is None else 1
        return (
            f"memory_budget: of {self.budget_bytes:,} bytes a step holds at most "
            f"{self.bound_bytes:,} (with nothing full {self.least_bytes:,}, with everything "
            f"{self.most_bytes:,}). Units that stay full between forward and backward: {len(names)}"
            f"{listed}; units gathered ahead: {self.forward_prefetch} in forward, "
            f"{ahead} in backward"
        )


class Settings(NamedTuple):
    """What a budget decides."""

    prefetches: bool = False
    """Whether a unit is gathered ahead, in forward and in backward."""
    kept: frozenset[int] = frozenset()
    """Indices of the units that stay full between forward and backward."""


class Learned(NamedTuple):
    """The most that steps with the default `Settings` held, on the fullest rank."""

    outside: int
    """Bytes before the first gather of a step and after its last reduction or free."""
    inside: int
    """Bytes in between."""
    sizes: tuple[int, ...]
    """Bytes of each unit's full buffers; the root's come first."""
    saved: tuple[int, ...]
    """Gathers of each unit in a step that keeping it full would save; 0: it must not be kept."""

    def bound(self, settings: Settings) -> int:
        """The most bytes that such a step with other settings can hold: all that is kept, and the
        largest unit ahead, may be full at any time between the first gather and the last free."""
        # The root comes first in each pass, so never ahead.
        ahead = max(self.sizes[1:], default=0) if settings.prefetches else 0
        inside = self.inside + ahead + sum(self.sizes[unit] for unit in settings.kept)
        return max(self.outside, inside)

    def ladder(self) -> Iterator[Settings]:
        """Settings, each of which holds more bytes than the one before and sends fewer.

        Prefetches first: they hide all gathers for the bytes of one unit. Then what saves most
        gathers for each byte that it holds; of equal units the last in the model.
        """
        settings = Settings(prefetches=True)
        yield settings
        rungs = [(n, unit) for unit, n in enumerate(self.saved) if n and self.sizes[unit]]
        for _, unit in sorted(rungs, reverse=True):
            settings = settings._replace(kept=settings.kept | {unit})
            yield settings

    def choose(self, budget: int) -> Settings:
        """The highest rung whose bound fits the budget."""
        best = Settings()
        for settings in self.ladder():
            if self.bound(settings) > budget:
                break
            best = settings
        return best


class Learner(Extension):
    """Begins to hold the memory budget of one model; see `before_forward`."""

    choice: MemoryChoice | None
    """None while it learns."""

    def __init__(self, root: RootState, budget: int) -> None:
        self.choice = None
        self._root: RootState = weakref.proxy(root)
        self._budget = budget
        self._meter: Meter | None = None
        self._num_steps = 0
        self._held = [0, 0]
        """The most bytes outside of the passes, and inside."""
        self._is_inside = False
        """Whether the step that runs has gathered a unit."""
        self._has_reduced = False
        """Whether the step that runs has reduced gradients."""
        self._gathers: Counter[str] = Counter()
        """Gathers in backward, by the unit's label."""
        self._versions: list[list[int]] = []
        for unit in root.units:
            if unit.options.reshard_after_forward is not True:
                raise ValueError(
                    f"{unit.label}: memory_budget chooses its reshard_after_forward; leave it out"
                )
        _refuse_compiled(root)
        _apply(root, Settings())
        if root.reducer.chooses_sums:  # Shards of them hold the least.
            root.reducer.sums_sharded, root.reducer.chooses_sums = True, False
        root.extensions.add(self)

    def before_forward(self, unit: Unit, forward_pass: ForwardPass) -> None:
        """Collective; blocks the host. Raises on every rank if the budget is less than a step
        needs."""
        root = self._root
        if root.join is not None:
            return  # Ranks run different steps.
        if self._meter is None:
            if torch.is_grad_enabled():
                self._start()
        elif torch.is_inference_mode_enabled():
            pass  # Its end would bring back that operations are counted, after the last step, too.
        elif self._has_reduced and not root.reducer.kept.adds_up:
            held, before, self._versions = self._meter.look(), self._versions, _versions(root)
            changed, peak = self._highest([int(before != self._versions), max(held, *self._held)])
            self._is_inside = not changed
            self._note(held)
            if changed:
                self._end_step(peak)
            if self._num_steps == _STEPS:
                self._stop()
                self._choose()

    def resized(self, storage: torch.UntypedStorage) -> None:
        if self._meter is not None:
            self._meter.resized(storage)

    def begin_action(self, action: str, unit: str) -> None:
        if self._meter is not None and action in ("unshard", "reduce"):
            self._note(self._meter.look())
            if action == "reduce":
                self._has_reduced = True
            else:
                self._is_inside = True
                self._gathers[unit] += self._root.context.in_backward

    def end_action(self, action: str, unit: str) -> None:
        if self._meter is not None and action == "reshard":
            self._note(self._meter.look())

    def _note(self, held: int) -> None:
        self._held[self._is_inside] = max(self._held[self._is_inside], held)

    def _start(self) -> None:
        root = self._root
        _refuse_compiled(root)
        self._meter = start_meter(root.device, root.units[0].module)
        # The model may go while it learns.
        self._stops = weakref.finalize(root.context.owner(), self._meter.stop)
        if isinstance(root.streams.reduce, FinishingStream):
            root.streams.reduce.is_late = True  # A budget must hold for the latest time.
        self._versions = _versions(root)

    def _stop(self) -> None:
        root = self._root
        self._stops()
        if isinstance(root.streams.reduce, FinishingStream):
            root.streams.reduce.is_late = False
        root.extensions.remove(self)

    def _end_step(self, peak: int) -> None:
        self._num_steps += 1
        self._has_reduced = False
        if self._num_steps == 1:
            # It made the optimizer's state, and found batches that no step had touched.
            self._held = [0, 0]
            self._gathers.clear()
        elif peak > self._budget:
            self._stop()
            raise RuntimeError(
                f"memory_budget: {self._budget:,} bytes are too few: a step needs at least "
                f"{peak:,} bytes"
            )

    def _choose(self) -> None:
        root = self._root
        for unit in root.units:
            if unit.forward_prefetch is not None or unit.backward_prefetch is not None:
                raise RuntimeError(
                    f"{unit.label}: memory_budget chooses what is prefetched; set no lists"
                )
        # A unit that only some ranks run has another place in the step of each rank.
        saved = [
            0 if unit.is_optional else self._gathers[unit.label] // (_STEPS - 1)
            for unit in root.units
        ]
        outside, inside, *fewest = self._highest([*self._held, *(-each for each in saved)])
        sizes = tuple(unit.nbytes for unit in root.units)
        learned = Learned(outside, inside, sizes, tuple(-each for each in fewest))
        settings = learned.choose(self._budget)
        _apply(root, settings)
        self.choice = MemoryChoice(
            budget_bytes=self._budget,
            bound_bytes=learned.bound(settings),
            least_bytes=learned.bound(Settings()),
            most_bytes=max(map(learned.bound, learned.ladder())),
            kept=tuple(root.units[index].fqn for index in sorted(settings.kept)),
            forward_prefetch=root.scheduler.forward_depth,
            backward_prefetch=root.scheduler.backward_prefetch,
        )
        if all(group.is_first for group in root.groups):
            _logger.info("%s", self.choice)

    def _highest(self, numbers: Sequence[int]) -> list[int]:
        """The highest of all ranks, for each number. Collective; blocks the host."""
        root = self._root
        groups = [*root.groups, *root.tensor_parallel_groups]
        name = partial(root.operations.next, "memory budget", "the model")
        table = torch.tensor(numbers, dtype=torch.int64, device=root.device)
        table = gather_along(table, groups, name)
        return [int(number) for number in table.view(-1, len(numbers)).amax(0).tolist()]


def refuse_what_it_chooses(given: Arguments) -> None:
    """Raises ValueError if the caller has chosen, too."""
    chosen = [name for name, value in _CHOSEN_FOR_A_BUDGET.items() if getattr(given, name) != value]
    if chosen:
        raise ValueError(
            "memory_budget: chooses what stays full and what is prefetched; leave out "
            + ", ".join(chosen)
        )


def _refuse_compiled(root: RootState) -> None:
    if root.device.type == "cpu" and any(map(is_compiled, root.units[0].module.modules())):
        raise ValueError("a compiled module is not measured: leave out memory_budget or compile()")


def _apply(root: RootState, settings: Settings) -> None:
    for unit in root.units:
        unit.set_options(reshard_after_forward=unit.index not in settings.kept)
    scheduler = root.scheduler
    scheduler.forward_depth = int(settings.prefetches)
    scheduler.backward_prefetch = BackwardPrefetch.BACKWARD_PRE if settings.prefetches else None
    scheduler.recorder.forget()  # Units may stay full that did not.
    # It would count units that are kept; the choice bounds what is ahead.
    root.context.limiter.budget = GatherBudget()


def _versions(root: RootState) -> list[list[int]]:
    return [handle.versions for unit in root.units for handle in unit.handles]
