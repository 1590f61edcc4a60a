"""What a memory budget buys: `choose` climbs a ladder of settings as far as the bytes reach.

Each rung adds to the one below, and the ladder is the same for every budget. So a larger budget
never gathers more bytes, and never prefetches less. Pure Python, no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from layerzero.config import BackwardPrefetch
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
