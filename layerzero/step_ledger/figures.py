"""Figures of a ledger: what the records of all ranks, on one clock, add up to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from layerzero.step_ledger.blame import LastPeers, Segment, explain
from layerzero.step_ledger.records import PEER_LATE, REASONS, Hop, Job, Record

Intervals = list[tuple[float, float]]


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
class GroupRow:
    """One process group of `Ledger.groups`: means of one step on this rank."""

    ranks: tuple[int, ...]
    verbs: tuple[str, ...]
    """What ran over it."""
    bytes: float
    """Bytes that this rank sent over it."""
    seconds: float
    """Time in which a collective was under way on it: issued by every rank, not yet arrived."""


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
    """Bound on the error of its clock's offset to the first rank's."""


class Explained:
    """All waits of all ranks with their causes."""

    def __init__(self, records: Mapping[int, Record]) -> None:
        """`records`: by rank, on one clock."""
        self.records = records
        self.peers = LastPeers(records)
        self.segments: dict[int, list[list[Segment]]] = {
            rank: [explain(record, wait, self.peers) for wait in record.waits]
            for rank, record in records.items()
        }

    def unit_row(self, rank: int, label: str, fqn: str) -> UnitRow:
        record = self.records[rank]
        steps = max(record.num_steps, 1)
        per_step = 1e3 / steps
        busy: dict[str, float] = defaultdict(float)
        exposed: dict[str, float] = defaultdict(float)
        sent: dict[str, int] = defaultdict(int)
        reasons = dict.fromkeys(REASONS, 0.0)
        waited_until: dict[int, float] = {}
        for wait, segments in zip(record.waits, self.segments[rank], strict=True):
            job = record.jobs[wait.job]
            if job.unit != label:
                continue
            waited_until[wait.job] = wait.end
            for segment in segments:
                reasons[segment.reason] += segment.seconds * per_step
                exposed[job.kind] += segment.seconds * per_step
        for index, job in enumerate(record.jobs):
            if job.unit == label and job.hops:
                end = max(_end_of(job, record), waited_until.get(index, 0.0))
                busy[job.kind] += (end - job.asked) * per_step
                sent[job.kind] += job.nbytes
        return UnitRow(
            fqn,
            busy["gather"],
            exposed["gather"],
            busy["reduction"],
            exposed["reduction"],
            sent["gather"] / steps,
            sent["reduction"] / steps,
            reasons,
        )

    def reasons(self) -> dict[str, float]:
        """Milliseconds of a step by reason, the mean of all ranks."""
        total = dict.fromkeys(REASONS, 0.0)
        for rank, waits in self.segments.items():
            per_step = 1e3 / max(self.records[rank].num_steps, 1) / len(self.records)
            for segment in (segment for segments in waits for segment in segments):
                total[segment.reason] += segment.seconds * per_step
        return total

    def group_rows(self, rank: int) -> list[GroupRow]:
        record = self.records[rank]
        steps = max(record.num_steps, 1)
        by_group: dict[tuple[int, ...], list[Hop]] = defaultdict(list)
        for job in record.jobs:
            for hop in job.hops:
                by_group[hop.ranks].append(hop)
        return [
            GroupRow(
                ranks,
                tuple(sorted({hop.verb for hop in hops})),
                sum(hop.nbytes * (len(ranks) - 1) / len(ranks) for hop in hops) / steps,
                length(self.under_way(rank, hops)) / steps,
            )
            for ranks, hops in sorted(by_group.items())
        ]

    def under_way(self, rank: int, hops: Sequence[Hop]) -> Intervals:
        """When collectives were under way: issued by every rank, and not arrived."""
        return [
            (min(max(hop.issued, self.peers.of(hop, rank)[0]), hop.arrived), hop.arrived)
            for hop in hops
            if hop.arrived is not None
        ]

    def rank_rows(self, errors: Mapping[int, float]) -> list[RankRow]:
        waited_for: dict[int, float] = defaultdict(float)
        for rank, record in self.records.items():
            for segments in self.segments[rank]:
                for segment in segments:
                    if segment.reason == PEER_LATE:
                        waited_for[segment.rank] += segment.seconds / max(record.num_steps, 1)
        rows = []
        for rank, record in sorted(self.records.items()):
            per_step = 1e3 / max(record.num_steps, 1)
            exposed: dict[str, float] = defaultdict(float)
            for wait in record.waits:
                exposed[record.jobs[wait.job].kind] += (wait.end - wait.begin) * per_step
            total = (record.end - record.begin) * per_step
            rows.append(
                RankRow(
                    rank,
                    total,
                    total - sum(exposed.values()),
                    exposed["gather"],
                    exposed["reduction"],
                    waited_for[rank] * 1e3,
                    errors[rank] * 1e3,
                )
            )
        return rows

    def parts(self, rank: int) -> dict[str, float]:
        """Milliseconds of a step: compute of each pass, the rest, and what was exposed."""
        record = self.records[rank]
        per_step = 1e3 / max(record.num_steps, 1)
        waits = [(wait.begin, wait.end) for wait in record.waits]
        parts = {}
        for phase in ("forward", "backward"):
            spans = [(s.begin, s.end) for s in record.slices if s.phase == phase and not s.unit]
            parts[phase] = length(without(spans, waits)) * per_step
        passes = [(s.begin, s.end) for s in record.slices if not s.unit]
        rest = without([(record.begin, record.end)], [*passes, *waits])
        parts["between passes"] = length(rest) * per_step
        for kind, name in (("gather", "exposed gathers"), ("reduction", "exposed reductions")):
            of_kind = [w for w in record.waits if record.jobs[w.job].kind == kind]
            parts[name] = sum(w.end - w.begin for w in of_kind) * per_step
        return parts


def _end_of(job: Job, record: Record) -> float:
    return record.end if job.end is None else job.end


def length(spans: Intervals) -> float:
    """Length of the union."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(end - max(begin, reached), 0.0)
        reached = max(reached, end)
    return total


def without(spans: Intervals, taken: Intervals) -> Intervals:
    """The parts of `spans` outside `taken`."""
    left = sorted(spans)
    result: Intervals = []
    taken = sorted(taken)
    for begin, end in left:
        for a, b in taken:
            if b <= begin or a >= end:
                continue
            if a > begin:
                result.append((begin, a))
            begin = max(begin, b)
            if begin >= end:
                break
        if begin < end:
            result.append((begin, end))
    return result
