"""The error of corrupted bytes."""

from __future__ import annotations


class CorruptionError(RuntimeError):
    """Bytes are not those that were sent or written. The message names unit, operation and rank.

    Every rank of the model raises it, and weights and optimizer state are as before the step. What
    was corrupted on the way, or in a full buffer, is gone with the step, which may be run again.
    After corruption of a main shard or of optimizer state, load a checkpoint.
    """
