"""Figures of a ledger: why compute stood still, and what the records of all ranks add up to.

Each wait is cut where its cause changes:

    wait for a gather   |--queued--|--peer late--|--transfer, or why it was issued late--|
                                   issued        last peer issued                  arrived

Queued: behind a reduction in flight ("previous reduction"), or because the host came to it late
("host-bound"). A reduction that waits for the one before it (decision 0011) waits for peers, and
else for that previous reduction.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from layerzero.step_ledger.records import (
    HOST_BOUND,
    PEER_LATE,
    PREVIOUS,
    REASONS,
    Hop,
    Job,
    Record,
    Wait,
)

Intervals = list[tuple[float, float]]


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
    segments: list[Segment] = []
    at = wait.begin

    def until(end: float, reason: str, rank: int = record.rank) -> None:
        nonlocal at
        end = min(end, wait.end)
        if end > at:
            segments.append(Segment(reason, at, end, rank))
            at = end

    job, blocker = record.jobs[wait.job], record.jobs[wait.blocker]
    base = blocker.cause if wait.job == wait.blocker else PREVIOUS
    reductions = _in_flight_before(record, wait.job)
    for hop in sorted(blocker.hops, key=lambda hop: hop.called):
        if job.kind == "gather":
            for reduction in reductions:
                # It may itself wait for a peer.
                last, peer = peers.of(reduction.hops[0], record.rank)
                until(min(hop.issued, last, reduction.end), PEER_LATE, peer)
                until(min(hop.issued, reduction.end), PREVIOUS)
            # On a device: compute waits for what the host has yet to issue.
            until(hop.called, HOST_BOUND)
        until(hop.issued, base)
        last, peer = peers.of(hop, record.rank)
        until(min(last, hop.arrived), PEER_LATE, peer)
        if hop.issued > hop.called:
            # Lanes of a device: a backend runs collectives of one group one after the other.
            same = (each.end for each in reductions if each.hops[0].ranks == hop.ranks)
            until(min(max(same, default=0.0), hop.arrived), PREVIOUS)
        until(hop.arrived, base)
    until(wait.end, base)
    return segments


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


@dataclass(frozen=True)
class UnitRow:
    """One unit of `Ledger.units`: means of one step on this rank."""

    fqn: str
    """Name in the outermost wrapped module; "" for that module itself."""
    gather_ms: float
    """From the calls that asked for its gathers until the parameters had arrived."""
    exposed_gather_ms: float
    """Of that, how long compute stood still for them."""
    reduce_ms: float
    """From the calls that asked for its reductions until their results were ready."""
    exposed_reduce_ms: float
    """Of that, how long compute stood still for them, or until they could start."""
    gather_bytes: float
    """Bytes of the unit's full buffer, once for each gather."""
    reduce_bytes: float
    """Bytes of its gradients' full buffer, once for each reduction."""
    reasons: dict[str, float]
    """Why it was exposed: milliseconds by reason, which add up to both exposed figures."""


@dataclass(frozen=True)
class RankRow:
    """One rank of `Ledger.ranks`: means of one step."""

    rank: int
    step_ms: float
    compute_ms: float
    """Time in which compute did not stand still, between passes included."""
    exposed_gather_ms: float
    exposed_reduce_ms: float
    waited_for_ms: float
    """Time that other ranks, together, waited for this rank to issue a collective."""
    clock_error_ms: float
    """Bound on the error of its clock's offset to the first rank's as the block began."""


class Explained:
    def __init__(self, records: Mapping[int, Record]) -> None:
        """`records`: by rank, on one clock."""
        self.records = records
        peers = LastPeers(records)
        self.segments: dict[int, list[list[Segment]]] = {
            rank: [explain(record, wait, peers) for wait in record.waits]
            for rank, record in records.items()
        }

    def unit_row(self, rank: int, label: str, fqn: str) -> UnitRow:
        record = self.records[rank]
        num_steps = max(record.num_steps, 1)
        busy: dict[str, float] = defaultdict(float)
        exposed: dict[str, float] = defaultdict(float)
        sent: dict[str, int] = defaultdict(int)
        reasons = dict.fromkeys(REASONS, 0.0)
        waited_until: dict[int, float] = {}
        for wait, segments in zip(record.waits, self.segments[rank], strict=True):
            job = record.jobs[wait.job]
            if job.unit == label:
                waited_until[wait.job] = wait.end
                for segment in segments:
                    reasons[segment.reason] += segment.seconds * record.ms_per_step
                    exposed[job.kind] += segment.seconds * record.ms_per_step
        for index, job in enumerate(record.jobs):
            if job.unit == label and job.hops:
                end = max(job.end, waited_until.get(index, job.end))
                busy[job.kind] += (end - job.asked) * record.ms_per_step
                sent[job.kind] += job.nbytes
        return UnitRow(
            fqn,
            busy["gather"],
            exposed["gather"],
            busy["reduction"],
            exposed["reduction"],
            sent["gather"] / num_steps,
            sent["reduction"] / num_steps,
            reasons,
        )

    def reasons(self) -> dict[str, float]:
        """Milliseconds of a step by reason, the mean of all ranks."""
        found = dict.fromkeys(REASONS, 0.0)
        for rank, record in self.records.items():
            for each in itertools.chain(*self.segments[rank]):
                found[each.reason] += each.seconds * record.ms_per_step / len(self.records)
        return found

    def rank_rows(self) -> list[RankRow]:
        waited_for: dict[int, float] = defaultdict(float)
        for rank, record in self.records.items():
            for segment in itertools.chain(*self.segments[rank]):
                if segment.reason == PEER_LATE:
                    waited_for[segment.rank] += segment.seconds * record.ms_per_step
        rows = []
        for rank, record in sorted(self.records.items()):
            gathers, reductions = self._exposed(rank)
            total = (record.end - record.begin) * record.ms_per_step
            compute = total - gathers - reductions
            late, error = waited_for[rank], record.clock_error * 1e3
            rows.append(RankRow(rank, total, compute, gathers, reductions, late, error))
        return rows

    def parts(self, rank: int) -> dict[str, float]:
        """Milliseconds of a step: compute of each pass, the rest, and what was exposed."""
        record = self.records[rank]
        waits = [(wait.begin, wait.end) for wait in record.waits]
        passes: dict[str, Intervals] = {"forward": [], "backward": []}
        for span in record.slices:
            if not span.unit:
                passes[span.phase].append((span.begin, span.end))
        whole = {**passes, "between passes": [(record.begin, record.end)]}
        taken = {**dict.fromkeys(passes, waits), "between passes": sum(passes.values(), waits)}
        parts = {name: length(whole[name] + taken[name]) - length(taken[name]) for name in whole}
        parts = {name: seconds * record.ms_per_step for name, seconds in parts.items()}
        gathers, reductions = self._exposed(rank)
        return {**parts, "exposed gathers": gathers, "exposed reductions": reductions}

    def _exposed(self, rank: int) -> tuple[float, float]:
        """Milliseconds of a step in which compute waited for gathers, and for reductions."""
        record = self.records[rank]
        exposed = {"gather": 0.0, "reduction": 0.0}
        for wait in record.waits:
            exposed[record.jobs[wait.job].kind] += (wait.end - wait.begin) * record.ms_per_step
        return exposed["gather"], exposed["reduction"]


def length(spans: Intervals) -> float:
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(end - max(begin, reached), 0.0)
        reached = max(reached, end)
    return total
