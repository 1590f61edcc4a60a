"""What a struck rank does, and the hooks through which the moment comes.

All of it happens on the struck rank alone, inside its own call: the others never take part in the
timing, so there is no race between the test and what it tests.
"""

import contextlib
import errno
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from layerzero.comm import new_groups, pending
from layerzero.comm.gloo import messages
from tests.faults.cells import Cell
from tests.harness.recording import observed


class Strike:
    """One fault that waits for its moment on this rank."""

    def __init__(self, cell: Cell, folder: Path) -> None:
        self._cell = cell
        self._folder = folder
        self._is_done = False
        self._watches = contextlib.ExitStack()
        self.brief_s = 0.4 * cell.timeout_s
        self.long_s = cell.timeout_s + cell.report_s + 3.0

    def arm(self, place: str) -> None:
        """Strike at the next call that belongs to the place."""
        if place in _CALLS:
            module, name = _CALLS[place]
            self._watches.enter_context(observed(module, name, self._at_call))
        else:
            self._watches.enter_context(observed(messages, "exchange", self._at_exchange))

    def arm_in_diagnosis(self) -> None:
        """Strike while this rank looks for the cause of an error."""
        for module in (pending, new_groups):
            self._watches.enter_context(observed(module, "diagnose", self._at_call))

    def now(self) -> None:
        if not self._is_done:
            self._is_done = True
            self._mark()
            _FAULTS[self._cell.fault](self)

    def _mark(self) -> None:
        path = self._folder / f"struck-{dist.get_rank()}"
        path.write_text(f"{time.monotonic()} {os.getpid()}")

    def _at_call(self, *_: Any, **__: Any) -> None:
        self.now()

    def _at_exchange(self, *args: Any, **_: Any) -> None:
        verb, unit = _OPERATIONS[self._cell.place]
        operation = args[3]
        if operation.verb == verb and unit in operation.unit:
            self.now()

    def _stop(self, seconds: float) -> None:
        wake = f"sleep {seconds}; kill -CONT {os.getpid()}"
        with subprocess.Popen(["/bin/sh", "-c", wake], stdout=subprocess.DEVNULL):
            os.kill(os.getpid(), signal.SIGSTOP)

    def _close(self) -> None:
        """Cut one connection to another rank in both directions; the process lives on."""
        found = [
            each
            for each in _sockets()
            if _store_port() not in (each.getsockname()[1], each.getpeername()[1])
        ]
        found[dist.get_rank() % len(found)].shutdown(socket.SHUT_RDWR)

    def _fill(self) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _abort(self) -> None:
        for group in list(dist.distributed_c10d._world.pg_map):
            group.abort()


def _sockets() -> Iterator[socket.socket]:
    """Connected TCP sockets of this process: gloo hides them, so they are found among its files."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found = socket.socket(fileno=os.dup(int(name)))
                if found.family in (socket.AF_INET, socket.AF_INET6):
                    found.getpeername()  # A listening socket has none.
                    yield found


def _store_port() -> int | None:
    store = dist.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "port", None)


_FAULTS: dict[str, Callable[[Strike], object]] = {
    "SIGKILL": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSTOP, SIGCONT in time": lambda strike: strike._stop(strike.brief_s),
    "SIGSTOP, SIGCONT too late": lambda strike: strike._stop(strike.long_s),
    "a socket closed": Strike._close,
    "abort() of the group": Strike._abort,
    "disk full": Strike._fill,
}
_CALLS: dict[str, tuple[Any, str]] = {
    "save: file": (os, "pwritev"),
    "load: file": (os, "preadv"),
    "save: new group": (dist, "new_group"),
    "construction: new group": (dist, "new_group"),
}
_OPERATIONS = {
    "gather": ("all-gather", "2"),
    "reduction": ("reduce-scatter", "2"),
    "presence exchange": ("gradient presence", ""),
    "clip": ("gradient norm", ""),
    "save: exchange": ("exchange", "checksums written"),
    "load: exchange": ("exchange", "names to load"),
    "construction: broadcast": ("synchronisation", "2.linear.weight"),
    "construction: exchange": ("exchange", "arguments and parameters"),
}
"""Verb of the operation that is struck, and a part of its unit."""
