"""A thread that checks an object periodically, as long as the object lives.

Threads end before the interpreter does: a daemon thread that comes back from C++ while Python is
torn down is ended by unwinding its stack. C++ answers that with `terminate`: the process aborts,
though all of its work is done.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")

_logger = logging.getLogger(__name__)
_LIMIT_S = 1.0
"""Bound on the wait for all threads together: a dead peer must not keep the process."""
_stops: weakref.WeakKeyDictionary[threading.Thread, Callable[[], object]] = (
    weakref.WeakKeyDictionary()
)


def run_periodically(
    owner: _T, check: Callable[[_T], bool], pause_s: float, name: str
) -> threading.Thread:
    """Start a thread that calls `check(owner)` after each pause.

    It ends when `check` returns False, when the owner is deleted, and at exit; not after an error
    of a check, of which the first is logged.

    `check` must hold no reference to the owner itself.
    """
    stop = threading.Event()
    # A daemon that holds its owner weakly: it must keep neither process nor model alive.
    arguments = (weakref.ref(owner), check, pause_s, stop)
    thread = threading.Thread(target=_run, args=arguments, name=name, daemon=True)
    thread.start()
    end_with(owner, thread, stop.set)
    return thread


def _run(
    owner_ref: weakref.ref[_T], check: Callable[[_T], bool], pause_s: float, stop: threading.Event
) -> None:
    has_failed = False
    while not stop.wait(pause_s):
        owner = owner_ref()
        if owner is None:
            return
        try:
            if not check(owner):
                return
        except Exception as error:
            if not has_failed:
                # A check may fail for a reason that passes, such as a query during a graph
                # capture. A lasting reason repeats at each check, so it is logged once.
                # As text: a kept record of the error itself would keep its frames, and the owner.
                thread, text = threading.current_thread().name, f"{type(error).__name__}: {error}"
                _logger.error("%s could not check, and goes on: %s", thread, text)
            has_failed = True
        del owner


def end_with(owner: object, thread: threading.Thread, stop: Callable[[], object]) -> None:
    """Call `stop`, upon which the thread ends, when the owner is deleted; and at exit, which waits
    for the thread for a moment."""
    weakref.finalize(owner, stop)
    _stops[thread] = stop


@atexit.register
def _end_all() -> None:
    stops = dict(_stops)
    for stop in stops.values():
        stop()
    deadline = time.monotonic() + _LIMIT_S
    for thread in stops:
        thread.join(max(deadline - time.monotonic(), 0.0))
