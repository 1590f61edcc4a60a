"""CheckpointError."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, is damaged, or does not fit. The message names it and why."""
