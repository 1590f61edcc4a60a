"""Turns a failed collective into one error that lists what every rank waits for.

Each failing rank publishes a report in the store of the default process group. For a few seconds it
reads the reports of its group's ranks, and of the ranks in other groups that those wait for. A rank
without a report is dead, stopped, or busy outside the engine. A wait that has lasted half of its
limit is warned of before (docs/reference/errors.md).
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch.distributed as dist

from layerzero.errors import CollectiveError
from layerzero.flat.placement import ShardGroup

REPORT_SECONDS = 5.0
"""Seconds that a failing rank waits for the reports of others."""
_STORE_GRACE_S = 1.0
"""Seconds added to it, for a store that answers late or never."""
_BEGAN = time.time()
"""Start of this process. A rank that has no run name yet ignores reports older than this."""
run_names: WeakKeyDictionary[dist.ProcessGroup, str] = WeakKeyDictionary()
"""Names of this process's runs, one per process group, on which its ranks have agreed."""

_logger = logging.getLogger(__name__)


class PeerRaised(RuntimeError):
    """Another rank raised, and sent its error in an exchange; all ranks can go on."""


class Collective(Protocol):
    """A collective in flight: issued, and not yet completed by the device (on CPU, the host)."""

    group: ShardGroup
    nbytes: int
    """Size of the whole tensor; of each message, where messages carry names."""
    peer: int
    """Group rank of the peer whose message is awaited now; -1: all."""
    number: int
    """Number of the operation within the model."""

    @property
    def name(self) -> str:
        """Name of the operation; the same on every rank."""

    @property
    def is_reached(self) -> bool:
        """Whether this rank's stream has reached the collective, and waits only for peers."""

    @property
    def is_done(self) -> bool: ...

    def wait(self) -> object: ...


def warns_at_half_time(name: str, group: ShardGroup, waits_for: str, seconds: float) -> bool:
    """Warn if a wait of so many seconds has lasted half of its limit; returns whether it has."""
    limit = group.limit.total_seconds()
    if seconds < limit / 2:
        return False
    _logger.warning(
        "%s: rank %d has waited %.3g s for %s; after %g s this is an error. If a rank is busy "
        "alone (a save, an evaluation, data, compilation), raise the limit on every rank: "
        "init_process_group(timeout=...), ZeRO3(timeout=...), or, around that phase, "
        "`with model.timeout(minutes=...):`",
        *(name, group.ranks[group.rank], seconds, waits_for, limit),
    )
    return True


def diagnose(
    operation: str,
    group: ShardGroup,
    peer: int,
    error: BaseException,
    find_divergence: Callable[[], str | None] | None = None,
) -> CollectiveError:
    """Make the error for a failed wait. Blocks the host for at most 1 s over `REPORT_SECONDS`.

    Logs its first line at once, except where the paths of ranks were found to diverge. A peer that
    waited elsewhere (in a collective of torch) fails with this rank's connections, and launchers
    end all processes as soon as one has failed: they would end this one before it raises.

    Args:
        operation: such as "all-gather of layers.3 (#42)".
        peer: group rank of the peer that did not answer; -1 if unknown.
        find_divergence: returns where the ranks' paths diverged, None if it is unknown; may block.
    """
    rank = group.ranks[group.rank]
    waits_for = "the group" if peer < 0 else f"rank {group.ranks[peer]}"
    reports = _Reports(f"waits for {waits_for} in {operation}", group, peer)
    verdict: list[str | None] = []

    def find() -> None:
        verdict.append(None if find_divergence is None else find_divergence())
        reports.exchange()

    # On a thread, joined with a timeout: the store may be served by the rank that died, and then a
    # call on it does not return.
    thread = threading.Thread(target=find, daemon=True)
    deadline = time.monotonic() + REPORT_SECONDS + _STORE_GRACE_S
    thread.start()
    thread.join(0.1)  # A store that answers gives the verdict at once.
    first = f"{operation}: rank {rank} got no answer from {waits_for}"
    cause = _cause(error, group.limit)
    if not any(verdict):
        then = "The error with what each rank waits for follows, unless this process is ended first"
        _logger.error("%s (%s). Every rank must make this call. %s.", first, cause, then)
    thread.join(deadline - time.monotonic())
    divergence = verdict[0] if verdict else None
    table = _table(reports, divergence is not None)
    return CollectiveError(f"{first} ({divergence or cause}).\n{table}")


def _cause(error: BaseException, timeout: timedelta) -> str:
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    lowered = str(error).lower()
    if "timed out" in lowered or "timeout" in lowered:
        return f"nothing arrived within the timeout of {timeout.total_seconds():g} s"
    if any(word in text.lower() for word in ("closed", "reset", "refused", "broken")):
        return "the connection closed: its process ended, or stopped waiting for another rank"
    return text


def _table(reports: _Reports, have_diverged: bool) -> str:
    ranks, texts, store_error = list(reports.ranks), dict(reports.texts), reports.store_error
    missing = "no report: dead, stopped, or busy outside the engine"
    if store_error is not None:
        missing = "unknown"
    lines = [f"  rank {rank}: {texts.get(rank, missing)}" for rank in ranks]
    waited_in = {text.rpartition(" in ")[2] for text in texts.values()}
    if store_error is not None:
        lines.append(
            f"Reports of other ranks are missing, because torch's store {store_error}. The rank or "
            "launcher that serves it may be dead."
        )
    elif len(texts) < len(ranks) and not have_diverged:
        lines.append(
            "Look at the ranks without a report first. One that still runs did not make this call: "
            "every rank must, also to save or load (not under `if rank == 0:`)."
        )
    elif len(waited_in) > 1 or len(texts) < len(ranks):
        lines.append(
            "The ranks wait in different operations: they took different paths through the model. "
            "Every rank must call the same units in the same order, and each save and load."
        )
    return "\n".join(lines)


class _Reports:
    """The report of this rank, which names what it waits for, and those of the others."""

    def __init__(self, text: str, group: ShardGroup, peer: int) -> None:
        self.ranks = list(group.ranks)
        """Global ranks whose reports are read, in the order of the error's table."""
        self.store_error: str | None = "does not answer"
        """Reason why the store cannot be read; None: it answered."""
        self._own = group.ranks[group.rank]
        self.texts = {self._own: text}
        self._waits_for = None if peer < 0 else group.ranks[peer]
        self._runs = set(run_names.values())
        self._oldest = time.time() - 2 * group.limit.total_seconds() - REPORT_SECONDS
        if not self._runs:
            self._oldest = max(self._oldest, _BEGAN)

    def exchange(self) -> None:
        """Publish the own report, and collect others for up to `REPORT_SECONDS`."""
        now = time.time()
        report = {
            "time": now,
            "text": self.texts[self._own],
            "waits_for": self._waits_for,
            "runs": sorted(self._runs),
        }
        try:
            store = dist.PrefixStore(
                "layerzero/reports", dist.distributed_c10d._get_default_store()
            )
            store.set(str(self._own), json.dumps(report))
            self.store_error = None
            while len(self.texts) < len(self.ranks) and time.time() < now + REPORT_SECONDS:
                for rank in list(self.ranks):
                    if rank not in self.texts and store.check([str(rank)]):
                        self._take(rank, json.loads(store.get(str(rank))))
                time.sleep(0.05)
        except (RuntimeError, ValueError) as error:
            self.store_error = f"failed ({str(error).strip().splitlines()[0]})"

    def _take(self, rank: int, report: dict[str, Any]) -> None:
        """Accept a report if it is of this run (`ModelNumber`) and recent."""
        runs = set(report.get("runs", ()))
        # A rank that failed before it wrapped a model has no run name; accept its report.
        is_of_this_run = not runs or not self._runs or runs & self._runs
        if report["time"] < self._oldest or not is_of_this_run:
            return
        self.texts[rank] = report["text"]
        self._runs |= runs  # Includes names of groups that this rank is not in.
        if report["waits_for"] not in (None, *self.ranks):
            self.ranks.append(report["waits_for"])


def open_notes(place: str) -> dist.Store | None:
    """The default group's store, for notes at `place`, by a connection that does not hold up the
    main thread's requests. None: there is no default group, or its store cannot be cloned."""
    try:
        store = dist.distributed_c10d._get_default_store()
        return dist.PrefixStore(f"layerzero/{place}", store.clone())  # type: ignore[attr-defined]
    except (RuntimeError, ValueError) as error:
        _logger.debug("ranks are not compared: %s", error)
        return None
