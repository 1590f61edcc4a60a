"""SaveHandle: the handle of a save, which may run in the background."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from layerzero.checkpoint.progress import ProgressReport

_logger = logging.getLogger(__name__)


class SaveHandle:
    """A save that is finished or running."""

    path: Path
    """The checkpoint's folder, once it is committed."""
    step: int

    def __init__(self, path: Path, step: int, progress: ProgressReport) -> None:
        self.path = path
        self.step = step
        self._progress = progress
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether the save has committed or failed. Not collective; does not block."""
        return self._thread is None or not self._thread.is_alive()

    @property
    def nbytes(self) -> tuple[int, int]:
        """(bytes written so far, total bytes to write) of this rank."""
        return self._progress.done_nbytes, self._progress.total_nbytes

    def wait(self) -> Path:
        """Return the folder once it is committed. Blocks; not collective, any rank may call it.

        Raises:
            CheckpointError: the save failed; earlier checkpoints are unchanged.
            CollectiveError: a rank died or did not take part.
        """
        if self._thread is not None:
            self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self.path

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error
            _logger.error("the background save of %s failed: %s", self.path, error)

    def start(self, work: Callable[[], None]) -> None:
        """Run `work` in a thread."""
        # Not a daemon thread, so that a process that exits normally finishes its save.
        self._thread = threading.Thread(target=self._run, args=(work,), name="layerzero-save")
        self._thread.start()
