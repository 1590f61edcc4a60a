"""Why compute stood still: each wait is cut where its cause changes.

    wait for a gather   |--queued--|--peer late--|--transfer, or why it was issued late--|
                                   issued        last peer issued                  arrived

Queued: behind a reduction in flight ("previous reduction"), or because the host came to it late
("host-bound"). A reduction that waits for the one before it (decision 0011) waits for peers, and
else for that previous reduction.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from layerzero.step_ledger.records import (
    HOST_BOUND,
    PEER_LATE,
    PREVIOUS,
    Hop,
    Job,
    Record,
    Wait,
)


class Segment(NamedTuple):
    reason: str
    begin: float
    end: float
    rank: int
    """Whom it waited for: the last peer to issue, if `reason` is "peer late"; else the own rank."""

    @property
    def seconds(self) -> float:
        return self.end - self.begin


class LastPeers:
    """For each collective, the last of the other ranks to issue it, on the clock of one rank."""

    def __init__(self, records: Mapping[int, Record]) -> None:
        """`records`: of all ranks, on one clock."""
        self._issued = {
            (rank, hop.number): hop.issued
            for rank, record in records.items()
            for job in record.jobs
            for hop in job.hops
        }

    def of(self, hop: Hop, rank: int) -> tuple[float, int]:
        """When, and which rank; the own one if no other has recorded it."""
        others = [
            (self._issued[peer, hop.number], peer)
            for peer in hop.ranks
            if peer != rank and (peer, hop.number) in self._issued
        ]
        return max(others, default=(hop.issued, rank))


def explain(record: Record, wait: Wait, peers: LastPeers) -> list[Segment]:
    """The causes of a wait, in order; together they are as long as the wait."""
    job, blocker = record.jobs[wait.job], record.jobs[wait.blocker]
    base = blocker.cause if wait.job == wait.blocker else PREVIOUS
    cut = _Cut(wait.begin, wait.end, record.rank)
    reductions = _in_flight_before(record, wait.job)
    for hop in sorted(blocker.hops, key=lambda hop: hop.called):
        if job.kind == "gather":
            for reduction in reductions:
                # It may itself wait for a peer.
                last, peer = peers.of(reduction.hops[0], record.rank)
                cut.until(min(hop.issued, last, reduction.end), PEER_LATE, peer)
                cut.until(min(hop.issued, reduction.end), PREVIOUS)
            # On a device: compute waits for what the host has yet to issue.
            cut.until(hop.called, HOST_BOUND)
        cut.until(hop.issued, base)
        last, peer = peers.of(hop, record.rank)
        cut.until(min(last, hop.arrived), PEER_LATE, peer)
        if hop.issued > hop.called:
            # Lanes of a device: a backend runs collectives of one group one after the other.
            same = (each.end for each in reductions if each.hops[0].ranks == hop.ranks)
            cut.until(min(max(same, default=0.0), hop.arrived), PREVIOUS)
        cut.until(hop.arrived, base)
    cut.until(wait.end, base)
    return cut.segments


class _Cut:
    def __init__(self, begin: float, end: float, rank: int) -> None:
        self.segments: list[Segment] = []
        self._at = begin
        self._end = end
        self._rank = rank

    def until(self, end: float, reason: str, rank: int | None = None) -> None:
        end = min(end, self._end)
        if end > self._at:
            who = self._rank if rank is None else rank
            self.segments.append(Segment(reason, self._at, end, who))
            self._at = end


def _in_flight_before(record: Record, index: int) -> list[Job]:
    """The reductions that were in flight when a gather was asked for, oldest first."""
    found: list[Job] = []
    if record.jobs[index].kind != "gather":
        return found
    for other in reversed(record.jobs[:index]):
        if other.kind == "reduction" and other.hops:
            if other.end <= record.jobs[index].asked:
                break  # They end in order.
            found.append(other)
    return found[::-1]
