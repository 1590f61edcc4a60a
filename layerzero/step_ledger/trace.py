"""A ledger as a file in Chrome's trace format, which Perfetto opens.

Each rank is a process with one track a lane: compute, gathers, reductions. Names are those of the
profiler's ranges (docs/howto/profile.md). A flow leads from each gather to the forward or backward
that used it. Times are microseconds from the beginning of the block, on the first rank's clock.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from layerzero.step_ledger.blame import LastPeers
from layerzero.step_ledger.figures import Explained
from layerzero.step_ledger.records import Job, Record, Slice, Wait

_COMPUTE, _GATHERS, _REDUCTIONS = 1, 2, 3
_LANES = {_COMPUTE: "compute", _GATHERS: "gathers", _REDUCTIONS: "reductions"}
_VERBS = {"gather": "unshard", "reduction": "reduce"}
_WAITS = {"gather": "wait_for_unshard", "reduction": "wait_for_reduce"}

Event = dict[str, Any]


def write_trace(explained: Explained, path: str | Path, about: Mapping[str, Any]) -> None:
    """Write all ranks. `about`: what the file says of itself."""
    events = [event for rank in sorted(explained.records) for event in _of_rank(explained, rank)]
    trace = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(about)}
    Path(path).write_text(json.dumps(trace))


def _of_rank(explained: Explained, rank: int) -> Iterator[Event]:
    record, start = explained.records[rank], min(r.begin for r in explained.records.values())
    yield _named("process_name", rank, 0, f"rank {rank}")
    for lane, name in _LANES.items():
        yield _named("thread_name", rank, lane, name)
        yield {**_named("thread_sort_index", rank, lane, ""), "args": {"sort_index": lane}}

    def event(name: str, lane: int, begin: float, end: float, **args: Any) -> Event:
        return {
            "name": name,
            "cat": "layerzero",
            "ph": "X",
            "pid": rank,
            "tid": lane,
            "ts": (begin - start) * 1e6,
            "dur": max(end - begin, 0.0) * 1e6,
            "args": args,
        }

    lanes = {"gather": _GATHERS, "reduction": _REDUCTIONS}
    begins: dict[int, tuple[int, float]] = {}
    for kind, lane in lanes.items():
        for index, begin, end in on_lane(record, kind):
            begins[index] = lane, begin
            label, args = _about_job(record.jobs[index], start, explained.peers, rank)
            yield event(label, lane, begin, end, **args)
    causes = {id(w): s for w, s in zip(record.waits, explained.segments[rank], strict=True)}
    used: list[tuple[int, float]] = []
    for span, begin, end in nested(record):
        if isinstance(span, Wait):
            why = [[s.reason, s.seconds * 1e3] for s in causes[id(span)]]
            job = record.jobs[span.blocker]
            name = f"LayerZeRO3.{_WAITS[job.kind]}({job.unit})"
            yield event(name, _COMPUTE, begin, end, reasons_ms=why)
            continue
        yield event(f"LayerZeRO3.{span.phase}({span.unit or 'model'})", _COMPUTE, begin, end)
        if span.job is not None and span.job in begins:
            used.append((span.job, begin))
    for index, begin in used:
        lane, at = begins[index]
        flow: Event = {
            "name": "gather to its use",
            "cat": "layerzero",
            "pid": rank,
            "id": rank << 32 | index,
        }
        yield {**flow, "ph": "s", "tid": lane, "ts": (at - start) * 1e6}
        yield {**flow, "ph": "f", "bp": "e", "tid": _COMPUTE, "ts": (begin - start) * 1e6}


def _named(what: str, rank: int, lane: int, name: str) -> Event:
    return {"name": what, "ph": "M", "pid": rank, "tid": lane, "args": {"name": name}}


def _about_job(job: Job, start: float, peers: LastPeers, rank: int) -> tuple[str, dict[str, Any]]:
    args: dict[str, Any] = {"bytes": job.nbytes, "asked_us": (job.asked - start) * 1e6}
    for hop in job.hops:
        last, peer = peers.of(hop, rank)
        args[f"{hop.verb} #{hop.number}"] = {
            "ranks": list(hop.ranks),
            "issued_us": (hop.issued - start) * 1e6,
            "last_peer": peer,
            "last_peer_issued_us": (last - start) * 1e6,
            "arrived_us": (hop.arrived - start) * 1e6,
        }
    return f"LayerZeRO3.{_VERBS[job.kind]}({job.unit})", args


def on_lane(record: Record, kind: str) -> list[tuple[int, float, float]]:
    """Index, begin and end of the jobs of one lane, one after the other: where two were in flight
    at once, the later one to end begins when the other has ended."""
    spans = []
    reached = float("-inf")
    jobs = [(job, index) for index, job in enumerate(record.jobs) if job.kind == kind and job.hops]
    for job, index in sorted(jobs, key=lambda pair: pair[0].end):
        begin = max(min(hop.issued for hop in job.hops), reached)
        reached = job.end
        spans.append((index, min(begin, reached), reached))
    return spans


def nested(record: Record) -> list[tuple[Slice | Wait, float, float]]:
    """What ran on the compute lane, outermost first; spans that overlap are cut, so that each lies
    inside the one around it."""
    spans: list[Slice | Wait] = [*record.slices, *record.waits]
    spans.sort(key=lambda span: (span.begin, -span.end))
    around: list[float] = []
    result = []
    for span in spans:
        while around and around[-1] <= span.begin:
            around.pop()
        end = min([span.end, *around[-1:]])
        result.append((span, span.begin, end))
        around.append(end)
    return result
