"""When a collective fails: ask every rank what it waits for, and say it in one error.

Each rank that fails leaves a line in the store the process group was made with, and reads for a few
seconds those of its group, and of whoever they wait for in other groups. A rank that left none is
dead, stopped, or busy outside the engine.
"""

from __future__ import annotations

import json
import threading
import time
from datetime import timedelta

import torch.distributed as dist

from layerzero.core.groups import ShardGroup

REPORT_SECONDS = 5.0
"""How long a failing rank waits for the reports of others."""


class CollectiveError(RuntimeError):
    """A collective did not finish. The message names operation, unit and ranks."""


def diagnose(operation: str, group: ShardGroup, peer: int, error: BaseException) -> CollectiveError:
    """Make the error for a failed wait. Blocks for at most a little over `REPORT_SECONDS`.

    Args:
        operation: such as "all-gather of layers.3 (#42)".
        peer: rank in the group that did not answer; -1 when the backend does not tell.
    """
    rank = group.ranks[group.rank]
    waits_for = "the group" if peer < 0 else f"rank {group.ranks[peer]}"
    reports: dict[int, str] = {}
    asked = list(group.ranks)
    # A thread of its own: the store itself may live on the rank that died or stopped.
    asker = threading.Thread(
        target=_exchange_reports,
        args=(f"waits for {waits_for} in {operation}", group, peer, asked, reports),
        daemon=True,
    )
    asker.start()
    asker.join(REPORT_SECONDS + 2.0)
    return CollectiveError(
        f"{operation}: rank {rank} got no answer from {waits_for} "
        f"({_cause(error, group.timeout)}).\n" + _table(list(asked), dict(reports))
    )


def _cause(error: BaseException, timeout: timedelta) -> str:
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    lowered = text.lower()
    if "timed out" in lowered or "timeout" in lowered:
        return f"nothing came within the timeout of {timeout.total_seconds():g} s"
    if "closed" in lowered or "reset" in lowered or "refused" in lowered or "broken" in lowered:
        return "the connection closed: its process ended, or gave up on another rank"
    return text


def _table(asked: list[int], reports: dict[int, str]) -> str:
    lines = []
    for rank in asked:
        report = reports.get(rank, "no report: dead, stopped, or busy outside the engine")
        lines.append(f"  rank {rank}: {report}")
    if len(reports) < len(asked):
        lines.append("Look at the ranks without a report first.")
    elif len({report.rpartition(" in ")[2] for report in reports.values()}) > 1:
        lines.append(
            "The ranks wait in different operations: they took different paths through the model. "
            "Every rank must call the same units in the same order."
        )
    return "\n".join(lines)


def _exchange_reports(
    text: str, group: ShardGroup, peer: int, asked: list[int], reports: dict[int, str]
) -> None:
    """Leave a report, and fill `reports` and `asked`."""
    now = time.time()
    own = group.ranks[group.rank]
    reports[own] = text
    try:
        store = dist.PrefixStore("layerzero/reports", dist.distributed_c10d._get_default_store())
        waits_for = None if peer < 0 else group.ranks[peer]
        store.set(str(own), json.dumps({"time": now, "text": text, "waits_for": waits_for}))
        oldest = now - 2 * group.timeout.total_seconds() - REPORT_SECONDS
        while len(reports) < len(asked) and time.time() < now + REPORT_SECONDS:
            for rank in list(asked):
                if rank not in reports and store.check([str(rank)]):
                    report = json.loads(store.get(str(rank)))
                    if report["time"] >= oldest:
                        reports[rank] = report["text"]
                        if report["waits_for"] not in (None, *asked):
                            asked.append(report["waits_for"])
            time.sleep(0.05)
    except (RuntimeError, ValueError) as error:
        reports.setdefault(own, f"{text} (no reports: {error})")
