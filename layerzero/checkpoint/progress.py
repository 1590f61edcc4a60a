"""Reports the progress of saves and loads to a callback."""

from __future__ import annotations

from collections.abc import Callable

ProgressCallback = Callable[[int, int], None]
"""Called with (bytes done, total bytes) of its rank."""


class ProgressReport:
    """Counts this rank's bytes, and reports them if requested."""

    def __init__(self, callback: ProgressCallback | None, total_nbytes: int) -> None:
        self.done_nbytes = 0
        self.total_nbytes = total_nbytes
        self._callback = callback

    def __call__(self, nbytes: int) -> None:
        self.done_nbytes += nbytes
        if self._callback is not None:
            self._callback(self.done_nbytes, self.total_nbytes)


def check_progress(callback: object) -> None:
    """Raise TypeError, before a save or load begins, if it is neither None nor a callable."""
    if callback is not None and not callable(callback):
        raise TypeError(f"progress: expected a callable(done, total) or None, got {callback!r}")
