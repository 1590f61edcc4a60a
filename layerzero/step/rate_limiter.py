"""RateLimiter: bounds how many unsharded units, or bytes of them, prefetching keeps resident.

It only counts, in the order of issue, which is the same on every rank, so ranks never disagree and
the host never blocks. The count also bounds *device* memory, because the unshard stream waits for
the event of the last free before it writes a new full buffer (docs/internals/streams.md).
"""

from __future__ import annotations

from layerzero.config import GatherBudget


class RateLimiter:
    """Counts resident full buffers against a budget."""

    def __init__(self, budget: GatherBudget) -> None:
        self.budget = budget
        self.num_units = 0
        self.nbytes = 0

    def reset(self) -> None:
        """Nothing is resident."""
        self.num_units = self.nbytes = 0

    def set_budget(self, budget: GatherBudget) -> None:
        self.budget = budget

    def admits(self, nbytes: int) -> bool:
        """Whether a prefetch of `nbytes` fits the budget. Gathers needed now are not checked."""
        budget = self.budget
        if budget.max_units is not None and self.num_units + 1 > budget.max_units:
            return False
        return budget.max_nbytes is None or self.nbytes + nbytes <= budget.max_nbytes

    def acquire(self, nbytes: int) -> None:
        self.num_units += 1
        self.nbytes += nbytes

    def release(self, nbytes: int) -> None:
        self.num_units -= 1
        self.nbytes -= nbytes
