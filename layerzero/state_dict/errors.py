"""CheckpointError, and a helper for its messages."""

from __future__ import annotations

from collections.abc import Sequence

_MAX_NAMES_SHOWN = 8


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, is damaged, or does not fit. The message names it and why."""


def some(names: Sequence[str]) -> str:
    """The first few names and the number of the others, for a message."""
    shown = ", ".join(names[:_MAX_NAMES_SHOWN]) or "nothing"
    more = len(names) - _MAX_NAMES_SHOWN
    return shown + (f" and {more} more" if more > 0 else "")
