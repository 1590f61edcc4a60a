"""Warns of a wait that has lasted half of its limit, before it becomes an error.

A slow rank is not a dead one: it may save, evaluate or wait for data. The warning names the
operation and the rank waited for, while there is still time to raise the limit of the next run.
"""

from __future__ import annotations

import logging
from typing import Protocol

from layerzero.flat.placement import ShardGroup

_logger = logging.getLogger(__name__)


class Collective(Protocol):
    """A collective in flight: issued, and not yet completed by the device (on CPU, the host)."""

    group: ShardGroup
    nbytes: int
    """Size of the whole tensor; of each message, where messages carry names."""
    peer: int
    """Group rank of the peer whose message is awaited now; -1: all."""
    number: int
    """Number of the operation within the model."""

    @property
    def name(self) -> str:
        """Name of the operation; the same on every rank."""

    @property
    def is_reached(self) -> bool:
        """Whether this rank's stream has reached the collective, and waits only for peers."""

    @property
    def is_done(self) -> bool: ...

    def wait(self) -> object: ...


def warns_at_half_time(name: str, group: ShardGroup, waits_for: str, seconds: float) -> bool:
    """Warn if a wait of so many seconds has lasted half of its limit; returns whether it has."""
    limit = group.limit.total_seconds()
    if seconds < limit / 2:
        return False
    _logger.warning(
        "%s: rank %d has waited %.3g s for %s; after %g s this is an error. If a rank is busy "
        "alone (a save, an evaluation, data, compilation), raise the limit on every rank: "
        "init_process_group(timeout=...), ZeRO3(timeout=...), or, around that phase, "
        "`with model.timeout(minutes=...):`",
        *(name, group.ranks[group.rank], seconds, waits_for, limit),
    )
    return True
