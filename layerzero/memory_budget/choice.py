"""What a memory budget buys: `choose` climbs a ladder of settings as far as the bytes reach.

Each rung adds to the one below, and the ladder is the same for every budget. So a larger budget
never gathers more bytes, and never prefetches less.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from layerzero.config import BackwardPrefetch
from layerzero.memory_budget.timeline import Settings, Timeline
from layerzero.notices import some


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
    saved_bytes: int
    """Bytes of full buffers that a step gathers less than one that keeps nothing full."""

    def __str__(self) -> str:
        names = [name or "the root unit" for name in self.kept]
        listed = f" ({some(names)})" if names else ""
        ahead = 0 if self.backward_prefetch is None else 1
        return (
            f"memory_budget: of {self.budget_bytes:,} bytes a step holds at most "
            f"{self.bound_bytes:,} (with nothing full {self.least_bytes:,}, with everything "
            f"{self.most_bytes:,}). Units that stay full between forward and backward: {len(names)}"
            f"{listed}, which saves gathers of {self.saved_bytes:,} bytes in each step; units "
            f"gathered ahead: {self.forward_prefetch} in forward, {ahead} in backward"
        )


class Costs(NamedTuple):
    """What each unit takes and saves; the same numbers on every rank."""

    sizes: Sequence[int]
    """Bytes of each unit's full buffers."""
    never_kept: frozenset[int]
    """Units that must be freed after forward."""


def choose(timeline: Timeline, costs: Costs, budget: int) -> Settings:
    """The highest rung whose bound fits the budget."""
    best = Settings()
    for settings in ladder(timeline, costs):
        if timeline.bound(settings, costs.sizes) > budget:
            break
        best = settings
    return best


def ladder(timeline: Timeline, costs: Costs) -> Iterator[Settings]:
    """Settings, each of which holds more bytes than the one before and sends fewer.

    Prefetches first: they hide all gathers for the bytes of one unit. Then what saves most gathers
    for each byte that it holds; of equal units the one that runs last in forward, which is kept for
    the shortest time.
    """
    settings = Settings(prefetches_in_backward=True)
    yield settings
    settings = settings._replace(forward_depth=1)
    yield settings
    rungs = [
        (gathers, _last_use(timeline, unit), unit)
        for unit, gathers in timeline.gathers.items()
        if costs.sizes[unit] and unit not in costs.never_kept
    ]
    for _, _, unit in sorted(rungs, reverse=True):
        settings = settings._replace(kept=settings.kept | {unit})
        yield settings


def _last_use(timeline: Timeline, unit: int) -> int:
    events = enumerate(timeline.events)
    return max((i for i, e in events if e.unit == unit and not e.in_backward), default=0)
