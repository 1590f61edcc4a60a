"""What a struck rank does, and the hooks through which the moment comes.

All of it happens on the struck rank alone, inside its own call: the others never take part in the
timing, so there is no race between the test and what it tests.
"""

import ctypes
import errno
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from layerzero.comm import new_groups, pending
from layerzero.comm.gloo import messages
from tests.faults import links
from tests.faults.cells import FATAL, Cell

_LARGE_NBYTES = 100_000
"""From here on a message can be cut in the middle; a smaller one is in a single packet."""


class Strike:
    """One fault that waits for its moment on this rank."""

    def __init__(self, cell: Cell, folder: Path) -> None:
        self._cell = cell
        self._folder = folder
        self._is_done = False
        self.brief_s = 0.4 * cell.timeout_s
        self.long_s = cell.timeout_s + cell.report_s + 3.0

    def arm(self, place: str) -> None:
        """Strike at the next call that belongs to the place."""
        if place in _CALLS:
            module, name = _CALLS[place]
            _replace(module, name, self._at_call)
        else:
            _replace(messages, "exchange", self._at_exchange)

    def arm_in_diagnosis(self) -> None:
        """Strike while this rank looks for the cause of an error."""
        for module in (pending, new_groups):
            _replace(module, "diagnose", self._at_call)

    def now(self) -> None:
        if not self._is_done:
            self._is_done = True
            self._mark()
            _FAULTS[self._cell.fault](self)

    def _mark(self) -> None:
        path = self._folder / f"struck-{dist.get_rank()}"
        path.write_text(f"{time.monotonic()} {os.getpid()}")

    def _at_call(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.now()
        return original(*args, **kwargs)

    def _at_exchange(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        verb, unit = _OPERATIONS[self._cell.place]
        operation = args[3]
        if self._is_done or operation.verb != verb or unit not in operation.unit:
            return original(*args, **kwargs)
        nbytes = max(tensor.nbytes for tensor in args[1])
        return self._in_message(lambda: original(*args, **kwargs), nbytes)

    def _in_message(self, send: Callable[[], Any], nbytes: int) -> Any:
        """Strike when a message is on its way: a part of it sent, or of its header."""
        is_cut = self._cell.fault in (*FATAL, "a message half sent")
        if nbytes < _LARGE_NBYTES:
            if is_cut:
                links.send_part_of_a_header()
                self.now()
            handle = send()
            self.now()
            return handle
        links.slow_down()
        handle = send()
        is_half = links.wait_until_half_sent()
        (self._folder / f"half-{dist.get_rank()}").write_text(str(is_half))
        self.now()
        links.speed_up()
        return handle

    def _stop(self, seconds: float) -> None:
        wake = f"sleep {seconds}; kill -CONT {os.getpid()}"
        with subprocess.Popen(["/bin/sh", "-c", wake], stdout=subprocess.DEVNULL):
            os.kill(os.getpid(), signal.SIGSTOP)

    def _hold(self, seconds: float) -> None:
        """A thread keeps the interpreter's lock: a call of `PyDLL` does not let go of it."""
        usleep = ctypes.PyDLL(None).usleep
        thread = threading.Thread(target=usleep, args=(int(seconds * 1e6),))
        thread.start()
        thread.join()

    def _close(self) -> None:
        links.speed_up()
        links.close_one(dist.get_rank())

    def _abort(self) -> None:
        for group in list(dist.distributed_c10d._world.pg_map):
            group.abort()

    def _stay_silent(self) -> None:
        """The connections stay open, and nothing more comes."""
        links.stall()
        others = [r for r in range(self._cell.world_size) if r not in self._cell.victims]
        deadline = time.monotonic() + 60.0
        while time.monotonic() < deadline:
            if all((self._folder / f"ended-{rank}").exists() for rank in others):
                raise Silent
            time.sleep(0.05)


class Silent(Exception):
    """The others have ended; this rank has nothing left to do."""


def _fill() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


_FAULTS: dict[str, Callable[[Strike], object]] = {
    "SIGKILL": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSEGV": lambda _: ctypes.string_at(0),
    "SIGSTOP, SIGCONT in time": lambda strike: strike._stop(strike.brief_s),
    "SIGSTOP, SIGCONT too late": lambda strike: strike._stop(strike.long_s),
    "GIL held briefly": lambda strike: strike._hold(strike.brief_s),
    "GIL held too long": lambda strike: strike._hold(strike.long_s),
    "a socket closed": Strike._close,
    "abort() of the group": Strike._abort,
    "a message half sent": Strike._stay_silent,
    "disk full": lambda _: _fill(),
}
_CALLS: dict[str, tuple[Any, str]] = {
    "save: file": (os, "pwritev"),
    "load: file": (os, "preadv"),
    "save: new group": (dist, "new_group"),
    "construction: new group": (dist, "new_group"),
}
_OPERATIONS = {
    "gather": ("all-gather", "blocks.1"),
    "reduction": ("reduce-scatter", "blocks.1"),
    "presence exchange": ("gradient presence", ""),
    "clip": ("gradient norm", ""),
    "save: exchange": ("exchange", "checksums written"),
    "load: exchange": ("exchange", "names to load"),
    "construction: broadcast": ("synchronisation", "blocks.1.linear.weight"),
    "construction: exchange": ("exchange", "arguments and parameters"),
}
"""Verb of the operation that is struck, and a part of its unit."""


def _replace(module: Any, name: str, around: Callable[..., Any]) -> None:
    original = getattr(module, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(module, name, call)
