"""What a memory budget buys: `choose` climbs a ladder of settings as far as the bytes reach.

Each rung adds to the one below, and the ladder is the same for every budget. So a larger budget
never gathers more bytes, and never prefetches less. Pure Python, no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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


class Settings(NamedTuple):
    """What a budget decides."""

    kept: frozenset[int] = frozenset()
    """Indices of the units that stay full between forward and backward."""
    forward_depth: int = 0
    prefetches_in_backward: bool = False


class Learned(NamedTuple):
    """The most that steps with the default `Settings` held, on the fullest rank."""

    outside: int
    """Bytes before the first gather of a step and after its last reduction or free."""
    inside: Mapping[frozenset[int], int]
    """Bytes in between, by the units that were full."""
    ahead: int
    """Bytes of the largest unit that may be gathered before its use."""
    sizes: tuple[int, ...]
    """Bytes of each unit's full buffers."""
    saved: tuple[int, ...]
    """Gathers of each unit in a step that keeping it full would save; 0: it must not be kept."""

    def bound(self, settings: Settings) -> int:
        """The most bytes that such a step with other settings can hold: all that is kept, and the
        largest unit ahead, may be full at any time between the first gather and the last free."""
        is_ahead = settings.forward_depth or settings.prefetches_in_backward
        ahead = self.ahead if is_ahead else 0
        inside = (
            peak + ahead + sum(self.sizes[unit] for unit in settings.kept - full)
            for full, peak in self.inside.items()
        )
        return max(self.outside, *inside)

    def ladder(self) -> Iterator[Settings]:
        """Settings, each of which holds more bytes than the one before and sends fewer.

        Prefetches first: they hide all gathers for the bytes of one unit. Then what saves most
        gathers for each byte that it holds; of equal units the last in the model.
        """
        settings = Settings(prefetches_in_backward=True)
        yield settings
        settings = settings._replace(forward_depth=1)
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
