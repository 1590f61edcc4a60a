"""What a memory budget buys: `choose` climbs a ladder of settings as far as the bytes reach.

Each rung adds to the one below, and the ladder is the same for every budget. So a larger budget
never gathers more bytes, and never prefetches less.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

from layerzero.config import BackwardPrefetch

_SHOWN = 12
"""Number of names that are listed."""


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
        shown = ", ".join(names[:_SHOWN])
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        listed = f" ({shown}{more})" if names else ""
        ahead = 0 if self.backward_prefetch is None else 1
        return (
            f"memory_budget: of {self.budget_bytes:,} bytes a step holds at most "
            f"{self.bound_bytes:,} (with nothing full {self.least_bytes:,}, with everything "
            f"{self.most_bytes:,}). {len(names)} units stay full between forward and backward"
            f"{listed}, which saves gathers of {self.saved_bytes:,} bytes in each step; units "
            f"gathered ahead: {self.forward_prefetch} in forward, {ahead} in backward"
        )


class Settings(NamedTuple):
    """What a budget decides."""

    kept: frozenset[int] = frozenset()
    """Indices of the units that stay full between forward and backward."""
    forward_depth: int = 0
    prefetches_in_backward: bool = False


class Steps(NamedTuple):
    """What the learned steps held and gathered; the same on every rank. Lists are by unit."""

    peak: int
    """The most live bytes."""
    sizes: Sequence[int]
    """Bytes of each unit's full buffers."""
    saved: Sequence[int]
    """How many gathers of a step keeping the unit would save; 0 if it cannot be kept."""
    last_use: Sequence[int]
    """Place of its last gather in forward, among all gathers of a step."""

    def bound(self, settings: Settings) -> int:
        """The most bytes that such a step can hold with these settings.

        Kept units, and one that is gathered ahead, may all be full at the peak: the end of forward
        in most models. The first unit is never gathered ahead, as nothing runs before it.
        """
        is_ahead = settings.forward_depth or settings.prefetches_in_backward
        ahead = max(self.sizes[1:], default=0) if is_ahead else 0
        return self.peak + ahead + sum(self.sizes[unit] for unit in settings.kept)


def choose(steps: Steps, budget: int) -> Settings:
    """The highest rung whose bound fits the budget."""
    fitting = takewhile(lambda settings: steps.bound(settings) <= budget, ladder(steps))
    return [Settings(), *fitting][-1]


def ladder(steps: Steps) -> Iterator[Settings]:
    """Settings, each of which holds more bytes than the one before and sends fewer.

    Prefetches first: they hide all gathers for the bytes of one unit. Then what saves most gathers
    for each byte that it holds; of equal units the one that runs last in forward, which is kept for
    the shortest time.
    """
    settings = Settings(prefetches_in_backward=True)
    yield settings
    settings = settings._replace(forward_depth=1)
    yield settings
    rungs = zip(steps.saved, steps.last_use, range(len(steps.sizes)), strict=True)
    for saved, _, unit in sorted(rungs, reverse=True):
        if saved and steps.sizes[unit]:
            settings = settings._replace(kept=settings.kept | {unit})
            yield settings
