"""Pictures of a ledger: a file in Chrome's trace format, and a drawing of one step.

In the file each rank is a process with one track a lane: compute, gathers, reductions. Names are
those of the profiler's ranges (docs/howto/profile.md). Times are microseconds from the beginning of
the block, on the first rank's clock.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from layerzero.step_ledger.figures import Explained
from layerzero.step_ledger.records import REASONS, Job, Record, Slice, Wait

_LANES = ("compute", "gathers", "reductions")
_JOBS = {"gather": "unshard", "reduction": "reduce"}
_COLOURS = ("#c44e52", "#937860", "#8172b3", "#222222", "#ccb974", "#f2c14e")
_OF_REASON = dict(zip(REASONS, _COLOURS, strict=True))
_OF_KIND = {"gather": "#64b5cd", "reduction": "#da8bc3"}
_OF_PHASE = {"forward": "#dddddd", "backward": "#bbbbbb"}
_ROOT = "the root unit"
_ROWS = {"gathers": 3.0, "compute": 2.0, "compute waits": 1.0, "reductions": 0.0}

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


def draw(explained: Explained, rank: int, path: str | Path) -> None:
    from matplotlib.figure import Figure

    record = explained.records[rank]
    steps = step_spans(record)
    if not steps:
        raise RuntimeError("ledger.plot: no step ran inside the block")
    begin, end = sorted(steps, key=lambda span: span[1] - span[0])[len(steps) // 2]
    figure = Figure(figsize=(7, 3.8), dpi=150, layout="constrained")
    axes = figure.subplots()

    def bar(lane: str, start: float, stop: float, colour: str, text: str = "") -> None:
        start, stop = max(start, begin), min(stop, end)
        if stop <= start:
            return
        left, width = (start - begin) * 1e3, (stop - start) * 1e3
        axes.barh(_ROWS[lane], width, 0.7, left, color=colour, edgecolor="white", linewidth=0.4)
        # About 80 characters fit into the width of the picture.
        if text and len(text) + 1 < 80 * (stop - start) / (end - begin):
            axes.text(left + width / 2, _ROWS[lane], text, ha="center", va="center")

    for lane, what, start, stop in spans(record):
        if isinstance(what, Wait):
            bar(lane, start, stop, "white")
        elif isinstance(what, Slice):
            # The root's slice is around those of other units.
            text = "" if what.unit == _ROOT else what.unit
            bar(lane, start, stop, _OF_PHASE[what.phase], text)
        else:
            bar(lane, start, stop, _OF_KIND[what.kind], what.unit)
    waited: defaultdict[str, float] = defaultdict(float)
    for segments in explained.segments[rank]:
        for segment in segments:
            if begin <= segment.begin < end:
                bar("compute waits", segment.begin, segment.end, _OF_REASON[segment.reason])
                waited[segment.reason] += (min(segment.end, end) - segment.begin) * 1e3
    legend = _OF_PHASE | {f"{why}, {waited[why]:.2g} ms": _OF_REASON[why] for why in waited}
    for label, colour in legend.items():
        axes.barh(0, 0, color=colour, label=label)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, handlelength=1.2)
    axes.set_yticks(list(_ROWS.values()), list(_ROWS))
    axes.set_xlim(0, (end - begin) * 1e3)
    axes.set_xlabel("ms")
    length = (end - begin) * 1e3
    axes.set_title(
        f"a step of {length:.0f} ms; compute waits {sum(waited.values()):.2g} ms", fontsize=11
    )
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def step_spans(record: Record) -> list[tuple[float, float]]:
    """Begin and end of each step: a step begins with the first forward after a backward, if there
    are any."""
    passes = sorted((s for s in record.slices if not s.unit), key=lambda s: s.begin)
    before = {s.phase for s in passes} - {"forward"} or {"forward"}
    begins = [
        following.begin
        for last, following in pairwise(passes)
        if following.phase == "forward" and last.phase in before
    ]
    return list(pairwise([record.begin, *begins, record.end])) if passes else []
