"""The errors that are layerzero's own. Wrong arguments and calls raise Python's."""

from __future__ import annotations

__all__ = ["CheckpointError", "CollectiveError", "CorruptionError"]


class CollectiveError(RuntimeError):
    """A collective did not finish. The message names operation, unit and ranks."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, is damaged, or does not fit. The message names it and why."""


class CorruptionError(RuntimeError):
    """Bytes are not those that were sent or written. The message names unit, operation and rank.

    Every rank of the model raises it, and weights and optimizer state are as before the step. What
    was corrupted on the way, or in a full buffer, is gone with the step, which may be run again. If
    copies of a main shard differ, load a checkpoint.
    """
