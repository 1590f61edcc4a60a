"""Lets threads end before the interpreter does.

A daemon thread that comes back from C++ while Python is torn down is ended by unwinding its stack.
C++ answers that with `terminate`: the process aborts, though all of its work is done.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable

_LIMIT_S = 1.0
"""Bound on the wait for all threads together: a dead peer must not keep the process."""
_stops: weakref.WeakKeyDictionary[threading.Thread, Callable[[], object]] = (
    weakref.WeakKeyDictionary()
)


def end_at_exit(thread: threading.Thread, stop: Callable[[], object]) -> None:
    """Call `stop` at exit, upon which the thread ends, and wait for it for a moment."""
    _stops[thread] = stop


@atexit.register
def _end_all() -> None:
    stops = dict(_stops)
    for stop in stops.values():
        stop()
    deadline = time.monotonic() + _LIMIT_S
    for thread in stops:
        thread.join(max(deadline - time.monotonic(), 0.0))
