"""The critical path: the chain of compute and communication that the end of the block waited for.

It is walked backwards. At a time on a rank, compute ran since the last wait. If that wait was for a
peer, the path goes on at that rank, at the time when it issued the collective.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass

from layerzero.step_ledger.figures import Explained
from layerzero.step_ledger.records import PEER_LATE, Record

_SHORTEST_S = 1e-9


@dataclass(frozen=True)
class PathRow:
    """Part of `Ledger.critical_path`: the mean of one step."""

    rank: int
    what: str
    """"forward", "backward", "between passes", or why compute stood still."""
    unit: str
    """Label of the unit that was waited for; "" for compute."""
    ms: float


def critical_path(explained: Explained) -> list[PathRow]:
    """Its parts, longest first; they add up to the step of the rank that ended last.

    So it begins where that rank entered the block, on whatever rank it is by then: others entered
    somewhat earlier or later.
    """
    records = explained.records
    last = max(records, key=lambda rank: records[rank].end)
    begin = records[last].begin
    total: dict[tuple[int, str, str], float] = defaultdict(float)
    walk = _Walk(explained)
    rank, now, seen = last, records[last].end, set()
    while (found := walk.last_wait(rank, now)) is not None and (rank, found) not in seen:
        seen.add((rank, found))
        record, wait = records[rank], records[rank].waits[found]
        if wait.end <= begin:
            break
        for phase, seconds in _phases(record, wait.end, now):
            total[rank, phase, ""] += seconds
        unit = record.jobs[wait.blocker].unit
        late, now = None, wait.begin
        for segment in reversed(explained.segments[rank][found]):
            if segment.reason == PEER_LATE and segment.rank != rank:
                late, now = segment, segment.end
                break
            total[rank, segment.reason, unit] += max(segment.end - max(segment.begin, begin), 0.0)
        rank = rank if late is None else late.rank
    for phase, seconds in _phases(records[rank], min(begin, now), now):
        total[rank, phase, ""] += seconds
    per_step = 1e3 / max(records[last].num_steps, 1)
    rows = [PathRow(*key, seconds * per_step) for key, seconds in total.items()]
    return sorted(rows, key=lambda row: -row.ms)


class _Walk:
    def __init__(self, explained: Explained) -> None:
        self._ends: dict[int, list[tuple[float, int]]] = {
            rank: sorted(
                (wait.end, index)
                for index, wait in enumerate(record.waits)
                if wait.end - wait.begin > _SHORTEST_S
            )
            for rank, record in explained.records.items()
        }

    def last_wait(self, rank: int, now: float) -> int | None:
        """Index of the last wait of a rank that ended by `now`."""
        ends = self._ends[rank]
        place = bisect_right(ends, (now, len(ends)))
        return ends[place - 1][1] if place else None


def _phases(record: Record, begin: float, end: float) -> list[tuple[str, float]]:
    """What compute did between two times: seconds by pass."""
    found = []
    rest = end - begin
    for each in record.slices:
        seconds = min(each.end, end) - max(each.begin, begin)
        if not each.unit and seconds > 0:
            found.append((str(each.phase), seconds))
            rest -= seconds
    return [*found, ("between passes", max(rest, 0.0))]
