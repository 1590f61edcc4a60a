"""The error of checkpoints."""

from __future__ import annotations

from collections.abc import Sequence

_MAX_NAMES_SHOWN = 8


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or is damaged, or does not fit. Says which and why."""


def some(names: Sequence[str]) -> str:
    """The first few of many, for a message."""
    shown = ", ".join(names[:_MAX_NAMES_SHOWN]) or "nothing"
    more = len(names) - _MAX_NAMES_SHOWN
    return shown + (f" and {more} more" if more > 0 else "")
