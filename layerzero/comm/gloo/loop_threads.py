"""gloo's threads beside those that compute, where there are fewer cores than threads.

Note [A thread that is preempted holds gloo's lock]
    gloo has a thread for its sockets. A thread that posts a message locks the connection, writes a
    notice of 48 bytes, and unlocks it. The notice wakes the peer's thread, which by default takes
    the core of the thread that has just written, inside the lock, if no core is free. From then on
    gloo's own thread finds events on the connection that it cannot handle, and polls again and
    again, thousands of times a step: it burns its core until the one that holds the lock has a
    core again (benchmarks/bench_loop_threads.py).

    Linux does not let a thread of the class SCHED_BATCH take a core from another one when it wakes:
    it runs at once where a core is free, else at the next tick. Its share of the cores stays the
    same.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

_NAME = "gloo_tcp_loop"
"""Name that gloo gives the thread of its sockets."""


def wake_without_preempting() -> None:
    """Let the threads of gloo's sockets in this process wait for a core when they wake.

    Skips threads with a scheduling class other than the default. Does nothing where there are no
    such classes. Not collective.
    """
    if not sys.platform.startswith("linux"):
        return
    for thread in _loop_threads():
        # It may end meanwhile, and a sandbox may forbid the call.
        with contextlib.suppress(OSError):
            if os.sched_getscheduler(thread) == os.SCHED_OTHER:
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


def _loop_threads() -> list[int]:
    """Numbers of the threads, in the system; those of this process that can be seen."""
    threads = []
    with contextlib.suppress(OSError):
        for folder in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):
                if (folder / "comm").read_text().strip() == _NAME:
                    threads.append(int(folder.name))
    return threads
