"""JoinState: one join on this rank, and the others as of the last exchange."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from layerzero.uneven.optimizers import JoinedOptimizers
from layerzero.uneven.scalers import JoinedScalers


@dataclass(kw_only=True)
class JoinState:
    """One join on this rank, and the others as of the last exchange."""

    optimizers: JoinedOptimizers
    scalers: JoinedScalers
    averages_active: bool
    """Whether gradients are means over the ranks that are not out of batches."""
    throws: bool = False
    """Whether to raise on all ranks once some are out."""
    notify: Callable[[], Any] = lambda: None
    """Function called before each exchange while this rank is not out; in torch's Join its
    `notify_join_context`."""
    is_enabled: Callable[[], bool] = lambda: True
    """Whether torch's Join around the loop is on."""
    hook: Callable[[], object] = lambda: True
    """Weak reference to what torch's Join holds as long as it lives."""
    participants: frozenset[int] = frozenset()
    """Units whose gradients are means over the ranks that had one."""
    num_active: int = 0
    """Ranks that were not out at the last exchange, of `num_ranks`."""
    num_ranks: int = 0
    is_common: bool = False
    """Whether all ranks had the request that was chosen."""
    is_following: bool = False
    """Whether this rank takes part in what others run."""
    makes_graph: bool = False
    """Whether the open forward has gradients."""
    has_ended: bool = False
    """Whether an error, of which every rank has heard, ends the join."""

    @property
    def is_abandoned(self) -> bool:
        """Whether an error ended torch's Join, which does not report that."""
        return self.hook() is None

    @property
    def is_idle(self) -> bool:
        """Whether calls of this rank are no steps of the join now."""
        return self.is_following or self.is_abandoned or not self.is_enabled()
