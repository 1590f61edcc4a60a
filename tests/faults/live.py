"""A rank's part in a cell: it trains, is struck or not, and tells how that ended.

What strikes happens on the struck rank alone, inside its own call: the others never take part in
the timing, so there is no race between the test and what it tests.
"""

import contextlib
import errno
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import layerzero
from layerzero import CollectiveError, ZeRO3, checkpoint
from tests.faults.cells import Cell
from tests.harness.internals import diagnosis, messages, new_groups, pending, watchdog
from tests.harness.recording import observed
from tests.harness.served_store import serve_store

_WIDTH = 512
_PATIENCE_S = 60.0
"""Timeout before the part that is struck, which a busy machine may slow down."""


class Outcome(NamedTuple):
    """What one rank saw."""

    rank: int
    how: str
    """"error", "refused" (CheckpointError), or "recovery"."""
    seconds: float
    """From the first strike to the end of it; for a rank that was stopped, from its return."""
    text: str
    losses: tuple[float, ...]


class Wide(nn.Module):
    """A block whose messages take more than one packet."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class _Run:
    def __init__(self, timeout_s: float, folder: Path, **options: Any) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, _WIDTH), Wide(), Wide(), Wide())
        self.folder = folder
        self.losses: list[float] = []
        timeout = timedelta(seconds=timeout_s)
        self.model = ZeRO3(net, auto_wrap_policy={Wide}, timeout=timeout, **options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)

    def step(self) -> None:
        generator = torch.Generator().manual_seed(100 * len(self.losses) + dist.get_rank())
        loss = self.model(torch.randn(4, 8, generator=generator)).square().mean()
        loss.backward()
        self.model.clip_grad_norm_(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())

    def save(self, name: str) -> None:
        checkpoint.save(self.folder / name, self.model, self.optimizer, step=1)


def live(cell: Cell, folder: Path, is_struck: bool) -> Outcome:
    """Go through one cell. `is_struck`: False runs the same without any fault."""
    diagnosis.REPORT_SECONDS = watchdog.REPORT_SECONDS = cell.report_s
    if cell.store_rank is not None:
        serve_store(cell.store_rank, folder)
    rank = dist.get_rank()
    strike = Strike(cell, folder) if is_struck and rank in cell.victims else None
    is_late = cell.second.startswith("one while") and rank == cell.victims[-1]
    run: _Run | None = None
    how, text = "recovery", ""
    try:
        run = _before(cell, folder)
        if strike is not None and is_late:
            strike.arm_in_diagnosis()
        elif strike is not None and cell.place != "between steps":
            strike.arm(cell.place)
        _meet(folder, cell.world_size)
        if strike is not None and not is_late and cell.place == "between steps":
            strike.now()
        run = _during(cell, folder, run)
    except layerzero.checkpoint.CheckpointError as error:
        how, text = "refused", str(error)
    except CollectiveError as error:
        how, text = "error", str(error)
    except Exception as error:
        how, text = "other error", f"{type(error).__name__}: {error}"
    end = time.monotonic()
    if how == "refused":
        assert run is not None
        run.step()
    return Outcome(rank, how, end - _began(cell, folder), text, tuple(run.losses if run else ()))


def _before(cell: Cell, folder: Path) -> _Run | None:
    if cell.place.startswith("construction"):
        return None
    run = _Run(_PATIENCE_S, folder)
    run.step()
    if cell.place.startswith("load"):
        run.save("saved")
    run.step()
    return run


def _during(cell: Cell, folder: Path, run: _Run | None) -> _Run:
    if run is None:
        is_sync = cell.place.endswith("broadcast")
        lanes = layerzero.ReductionPolicy(separate_groups=cell.place.endswith("group"))
        run = _Run(cell.timeout_s, folder, sync_module_states=is_sync, reduction=lanes)
    with run.model.timeout(seconds=cell.timeout_s):
        if cell.place.startswith("save"):
            run.save("struck")
        elif cell.place.startswith("load"):
            checkpoint.load(folder / "saved", run.model, run.optimizer)
        run.step()
        run.step()
    return run


def _began(cell: Cell, folder: Path) -> float:
    times = [path.read_text().split()[0] for path in folder.glob("struck-*")]
    return min(map(float, times), default=0.0)


def _meet(folder: Path, world_size: int) -> None:
    """All ranks go on together: what a cell measures does not include their start."""
    (folder / f"ready-{dist.get_rank()}").touch()
    while len(list(folder.glob("ready-*"))) < world_size:
        time.sleep(0.01)


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
