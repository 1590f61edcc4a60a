"""The reduce stream on CPU, for backends on which the engine does the sums itself (gloo).

Its thread finishes each reduction as soon as its data has arrived; an all-gather prefetched in
backward starts after that (decision 0012).

Note [A thread that is preempted holds gloo's lock]
    gloo has a thread for its sockets. A thread that posts a message locks the connection, writes a
    notice of 48 bytes, and unlocks it. The notice wakes the peer's thread, which by default takes
    the core of the thread that has just written, inside the lock, if no core is free. From then on
    gloo's own thread finds events on the connection that it cannot handle, and polls again and
    again, thousands of times a step: it burns its core until the one that holds the lock has a
    core again (benchmarks/results/loop_threads_epyc2_202611.md).

    Linux does not let a thread of the class SCHED_BATCH take a core from another one when it wakes:
    it runs at once where a core is free, else at the next tick. Its share of the cores stays the
    same.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

from layerzero.comm.streams import ChainedCollectives, InlineStream, Waitable
from layerzero.watch.thread import end_with


class FinishingStream(InlineStream):
    """An inline stream whose thread finishes its collectives, in order of issue."""

    is_late = False
    """Whether work runs only once it is waited for, the latest that the thread may come to it: what
    a step holds at most is then the same from run to run. Change it between steps."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[OnThread | None] = queue.SimpleQueue()
        self._last: OnThread | None = None
        self._thread: threading.Thread | None = None
        self._late: deque[OnThread] = deque()

    def start_after(self, first: Waitable | None, issue: Callable[[], Waitable]) -> Waitable:
        """Let the thread start a collective, after `first`. Does not block the host, unless late:
        a gather that waits for another does not start late."""
        if self.is_late and first is not None:
            first.wait()
            first = None
        if first is None and (self._last is None or self._last.is_done):
            return issue()
        return self._enqueue(partial(super().start_after, first, issue))

    def wait_until_idle(self) -> None:
        # Forgotten: its error would keep the frames of all callers of `wait` alive.
        last, self._last = self._last, None
        if last is not None:
            last.wait_until_idle()

    def _enqueue(self, work: Callable[[], Waitable | None]) -> Waitable:
        if self.is_late:
            self._last = OnThread(work, threading.current_thread(), self._late)
            self._late.append(self._last)
            return self._last
        if self._thread is None:
            # A daemon: a thread that waits for a dead peer must not keep the process from exiting.
            self._thread = threading.Thread(
                target=_run_all, args=(self._queue,), name="layerzero-stream", daemon=True
            )
            self._thread.start()
            end_with(self, self._thread, partial(self._queue.put, None))
        self._last = OnThread(work, self._thread)
        self._queue.put(self._last)
        return self._last

    def enqueue_wait(
        self, pending: Waitable, on_done: Callable[[], None] | None = None
    ) -> Waitable:
        """Let the thread wait for the collective, then call `on_done`. Does not block the host."""

        def finish() -> None:
            pending.wait()
            if on_done is not None:
                on_done()

        return self._enqueue(finish)

    def run(self, collectives: ChainedCollectives, input_done: Callable[[], None]) -> Waitable:
        """Let the thread run the collectives. Does not block the host."""
        return self._enqueue(lambda: collectives(input_done))


class OnThread:
    """Work for the stream's thread; may start a collective, which `wait` then waits for as well.
    The thread that waits runs what is late, after all that is `late` before it."""

    def __init__(
        self,
        work: Callable[[], Waitable | None],
        thread: threading.Thread,
        late: deque[OnThread] | None = None,
    ) -> None:
        self._work: Callable[[], Waitable | None] | None = work
        self._thread = thread
        self._late = late
        self._started: Waitable | None = None
        self._error: BaseException | None = None
        self._has_run = threading.Event()

    @property
    def is_done(self) -> bool:
        return self._has_run.is_set()

    def run(self) -> None:
        """Do the work, on the stream's thread; `wait` raises its error."""
        try:
            assert self._work is not None, "runs once"
            self._started = self._work()
        except BaseException as error:
            self._error = error
        finally:
            self._work = None
            self._has_run.set()

    def wait_until_idle(self) -> None:
        while self._late and not self.is_done:
            self._late.popleft().run()
        while not self._has_run.wait(timeout=1.0):
            if not self._thread.is_alive():
                raise RuntimeError(
                    "the thread that finishes reductions has ended: was the process forked after "
                    "training began? Wrap the model in the process that trains it"
                )

    def wait(self) -> None:
        self.wait_until_idle()
        if self._error is not None:
            raise self._error
        if self._started is not None:
            self._started.wait()


def _run_all(work: queue.SimpleQueue[OnThread | None]) -> None:
    while (item := work.get()) is not None:
        item.run()
        del item  # Else the loop variable keeps its result alive until the next item comes.


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
                if (folder / "comm").read_text().strip() == "gloo_tcp_loop":
                    threads.append(int(folder.name))
    return threads
