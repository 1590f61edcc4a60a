"""Handles that note when a collective is done, around those of the engine."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from layerzero.comm.pending import Pending
from layerzero.comm.streams import Waitable
from layerzero.step_ledger.clocks import LaneClock
from layerzero.step_ledger.records import Hop


class Waiters:
    """Threads of which each waits for one collective at a time, as many as are in flight.

    On gloo nobody but who waits for a message learns when it came. One thread for all would note
    a collective late while it waits for another.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_idle = 0
        self._num_threads = 0

    def submit(self, wait: Callable[[], None]) -> None:
        with self._lock:
            starts = self._num_idle <= 0
            self._num_idle += 0 if starts else -1
            self._num_threads += starts
        self._queue.put(wait)
        if starts:
            # A daemon: one that waits for a dead peer must not keep the process from exiting.
            threading.Thread(target=self._run, name="layerzero-ledger", daemon=True).start()

    def _run(self) -> None:
        while (wait := self._queue.get()) is not None:
            wait()
            del wait  # Else it keeps its buffers until the next one comes.
            with self._lock:
                self._num_idle += 1

    def close(self) -> None:
        """Let the threads end once they have nothing to wait for. Does not block."""
        for _ in range(self._num_threads):
            self._queue.put(None)


class TimedCollective:
    """A `Pending` whose hop gets its times."""

    def __init__(self, pending: Pending, hop: Hop, clock: LaneClock) -> None:
        self._pending = pending
        self._hop = hop
        self._clock = clock
        self._thread_is_done: threading.Lock | None = None
        self._error: BaseException | None = None

    def wait_on(self, waiters: Waiters) -> None:
        """Have a thread wait for the data from now on; `wait` then waits for the thread."""
        self._thread_is_done = threading.Lock()
        self._thread_is_done.acquire()
        waiters.submit(self._wait_on_thread)

    def _wait_on_thread(self) -> None:
        try:
            self._pending.wait_for_data()
            self._hop.arrived = self._clock.now()
        except BaseException as error:
            self._error = error
        finally:
            assert self._thread_is_done is not None
            self._thread_is_done.release()

    def wait(self) -> None:
        if self._thread_is_done is not None:
            with self._thread_is_done:
                pass
            if self._error is not None:
                raise self._error
            self._pending.wait()
            return
        self._pending.wait_for_data()
        self._hop.arrived = self._clock.now()
        self._pending.wait()
        self._hop.done = self._clock.now()


class TimedWork:
    """A stream's handle; the recorder notes who waits for it."""

    def __init__(self, work: Waitable, job: int, note: Callable[[int, Waitable], Any]) -> None:
        self._work = work
        self._job = job
        self._note = note

    def wait(self) -> None:
        self._note(self._job, self._work)
