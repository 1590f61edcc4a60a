"""LateStream: finishes reductions when somebody waits for them, and no sooner.

The thread of gloo's reduce stream frees what a reduction held some time after its data has come.
What a step holds at most differs by that from run to run; a budget must hold for the latest time.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from layerzero.comm.streams import FinishingStream, OnThread, Waitable


class LateStream(FinishingStream):
    """Runs its work on the thread that waits for it, after all that was enqueued before."""

    def __init__(self) -> None:
        super().__init__()
        self._late: deque[OnThread] = deque()

    def _enqueue(self, work: Callable[[], Waitable | None]) -> Waitable:
        self._last = _Late(work, self._late)
        self._late.append(self._last)
        return self._last


class _Late(OnThread):
    def __init__(self, work: Callable[[], Waitable | None], queue: deque[OnThread]) -> None:
        super().__init__(work, threading.current_thread())
        self._before = queue

    def wait(self) -> None:
        while not self.is_done:
            self._before.popleft().run()
        super().wait()
