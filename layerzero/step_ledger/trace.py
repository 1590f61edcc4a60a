"""A ledger as a file in Chrome's trace format, which Perfetto opens.

Each rank is a process with one track a lane: compute, gathers, reductions. Names are those of the
profiler's ranges (docs/howto/profile.md). Times are microseconds from the
beginning of the block, on the first rank's clock.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from layerzero.step_ledger.figures import Explained
from layerzero.step_ledger.records import Job, Record, Slice, Wait

_LANES = ("compute", "gathers", "reductions")
_JOBS = {"gather": "unshard", "reduction": "reduce"}

Event = dict[str, Any]


class Span(NamedTuple):
    lane: str
    what: Job | Slice | Wait
    begin: float
    end: float


def write_trace(explained: Explained, path: str | Path, about: Mapping[str, Any]) -> None:
    """Write all ranks. `about`: what the file says of itself."""
    events = [event for rank in sorted(explained.records) for event in _of_rank(explained, rank)]
    trace = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(about)}
    Path(path).write_text(json.dumps(trace))


def _of_rank(explained: Explained, rank: int) -> Iterator[Event]:
    record, start = explained.records[rank], min(r.begin for r in explained.records.values())

    def event(name: str, kind: str, lane: str, **fields: Any) -> Event:
        tid = 1 + _LANES.index(lane)
        return {"name": name, "ph": kind, "cat": "layerzero", "pid": rank, "tid": tid, **fields}

    def us(seconds: float) -> float:
        return (seconds - start) * 1e6

    yield event("process_name", "M", "compute", args={"name": f"rank {rank}"})
    for index, lane in enumerate(_LANES):
        yield event("thread_name", "M", lane, args={"name": lane})
        yield event("thread_sort_index", "M", lane, args={"sort_index": index})
    causes = {id(w): s for w, s in zip(record.waits, explained.segments[rank], strict=True)}
    for lane, what, begin, end in spans(record):
        args: dict[str, Any] = {}
        if isinstance(what, Job):
            name = f"{_JOBS[what.kind]}({what.unit})"
            args = {"bytes": what.nbytes, "asked_us": us(what.asked)}
        elif isinstance(what, Wait):
            job = record.jobs[what.blocker]
            name = f"wait_for_{_JOBS[job.kind]}({job.unit})"
            args = {"reasons_ms": [[s.reason, s.seconds * 1e3] for s in causes[id(what)]]}
        else:
            name = f"{what.phase}({what.unit or 'model'})"
        length = max(end - begin, 0.0) * 1e6
        yield event(f"LayerZeRO3.{name}", "X", lane, ts=us(begin), dur=length, args=args)


def spans(record: Record) -> Iterator[Span]:
    """What each lane shows: first the jobs, one after the other; then compute, outermost first.

    Where two jobs of a lane were in flight at once, the later one to end begins when the other has
    ended. What overlaps on the compute lane is cut, so that each span lies inside the one around
    it.
    """
    for kind, lane in (("gather", "gathers"), ("reduction", "reductions")):
        reached = float("-inf")
        jobs = [job for job in record.jobs if job.kind == kind and job.hops]
        for job in sorted(jobs, key=lambda job: job.end):
            begin = max(min(hop.issued for hop in job.hops), reached)
            reached = job.end
            yield Span(lane, job, min(begin, reached), reached)
    on_compute: list[Slice | Wait] = [*record.slices, *record.waits]
    around: list[float] = []
    for each in sorted(on_compute, key=lambda each: (each.begin, -each.end)):
        while around and around[-1] <= each.begin:
            around.pop()
        end = min([each.end, *around[-1:]])
        yield Span("compute", each, each.begin, end)
        around.append(end)
