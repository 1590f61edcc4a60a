"""Does a training step on a GPU overlap as docs/internals/streams.md draws it? Reads a trace.

The trace is one of torch.profiler in Chrome's format. Steps are ranges whose name begins with
`STEP`; what the engine does for a unit is a range of its own, "LayerZeRO3.unshard(layers.3)". Work
on the device belongs to the range in which the host launched it.
"""

from __future__ import annotations

import bisect
import gzip
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

STEP = "bench_step"
_RANGE = re.compile(r"LayerZeRO3\.(\w+)\((.*)\)")
_COLLECTIVE = re.compile(r"nccl|oneRank|link_copy|memcpy.*(dtod|device -> device)", re.IGNORECASE)
_BLOCKING = re.compile(
    r"cuda(Stream|Device|Event)Synchronize|cudaMemcpy|cudaMemset|cudaMalloc|cudaFree|cudaHostAlloc"
    r"|cuMemCreate|cuMemMap|cuMemUnmap|cuCtxSynchronize|cuStreamSynchronize"
)


class Work(NamedTuple):
    """A kernel or copy on the device. Times are in microseconds."""

    name: str
    stream: int
    start: float
    end: float
    launched: float
    """When the host launched it."""
    action: str
    """Of the engine's innermost range around the launch: "unshard", "reduce", ...; else ""."""
    unit: str


class Step(NamedTuple):
    """One step of a trace."""

    works: Sequence[Work]
    blocking_calls: Sequence[str]
    """Calls of CUDA's runtime that can block the host."""

    @property
    def gathers(self) -> list[Work]:
        return [w for w in self.works if w.action == "unshard" and _COLLECTIVE.search(w.name)]

    @property
    def compute(self) -> list[Work]:
        """What ran on the stream on which the model's own kernels take the most time, in order."""
        busy: Counter[int] = Counter()
        for work in self.works:
            if not work.action:
                busy[work.stream] += int(1e3 * (work.end - work.start))
        if not busy:
            raise ValueError("a step without kernels of the model: was the device profiled?")
        stream = busy.most_common(1)[0][0]
        return sorted((w for w in self.works if w.stream == stream), key=lambda w: w.start)


def read_steps(events: Iterable[dict[str, Any]]) -> list[Step]:
    """The steps in the `traceEvents` of a trace.

    Raises:
        ValueError: the trace has no steps.
    """
    events = [event for event in events if event.get("ph") == "X"]
    notes = [event for event in events if event.get("cat") == "user_annotation"]
    steps = [event for event in notes if event["name"].startswith(STEP)]
    if not steps:
        raise ValueError(f"the trace has no range named {STEP}...")
    runtime = [e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")]
    launches = {e["args"]["correlation"]: e for e in runtime if "correlation" in e.get("args", {})}
    find = _finder([event for event in notes if _RANGE.match(event["name"])])
    works = []
    for event in events:
        launch = launches.get(event.get("args", {}).get("correlation"))
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and launch is not None:
            times = event["ts"], event["ts"] + event["dur"], launch["ts"]
            works.append(Work(event["name"], event["args"]["stream"], *times, *find(launch)))
    return [
        Step(
            [work for work in works if _holds(step, work.launched)],
            [
                e["name"]
                for e in runtime
                if _holds(step, e["ts"]) and _BLOCKING.fullmatch(e["name"])
            ],
        )
        for step in sorted(steps, key=lambda step: step["ts"])
    ]


def _holds(event: dict[str, Any], time: float) -> bool:
    return bool(event["ts"] <= time <= event["ts"] + event["dur"])


def _finder(ranges: list[dict[str, Any]]) -> Callable[[dict[str, Any]], tuple[str, str]]:
    """A function that finds the innermost of the engine's ranges around a launch."""
    by_thread: dict[Any, list[dict[str, Any]]] = {}
    for note in sorted(ranges, key=lambda note: note["ts"]):
        by_thread.setdefault((note.get("pid"), note.get("tid")), []).append(note)
    begins = {thread: [note["ts"] for note in notes] for thread, notes in by_thread.items()}

    def find(launch: dict[str, Any]) -> tuple[str, str]:
        thread = (launch.get("pid"), launch.get("tid"))
        last = bisect.bisect_right(begins.get(thread, []), launch["ts"])
        # Ranges nest a few deep; one that began long before has ended.
        for note in reversed(by_thread.get(thread, [])[max(0, last - 8) : last]):
            if _holds(note, launch["ts"]):
                action, unit = _RANGE.match(note["name"]).groups()  # type: ignore[union-attr]
                return action, unit
        return "", ""

    return find


def measures(step: Step) -> dict[str, float]:
    """By the names of gpu_expected.py: the part of the gathers' time beside work of the compute
    stream, gathers on that stream, and calls that can block the host."""
    streams = {work.stream for work in step.compute}
    return {
        "hidden_part": hidden_part(step.gathers, step.compute),
        "trace_gathers": float(not step.gathers),
        "trace_gathers_on_compute": float(sum(w.stream in streams for w in step.gathers)),
        "trace_host": float(len(step.blocking_calls)),
    }


def hidden_part(gathers: Sequence[Work], compute: Sequence[Work]) -> float:
    """The part of the gathers' time that runs beside work of `compute`, in order of time."""
    total = sum(work.end - work.start for work in gathers)
    begins = [work.start for work in compute]
    covered = 0.0
    for gather in gathers:
        at = max(0, bisect.bisect_right(begins, gather.start) - 1)
        reached = gather.start
        while at < len(compute) and compute[at].start < gather.end:
            start, end = max(compute[at].start, reached), min(compute[at].end, gather.end)
            if end > start:
                covered += end - start
                reached = end
            at += 1
    return covered / total if total else 1.0


def load(path: Path) -> list[dict[str, Any]]:
    """The events of a trace file, packed by gzip or not."""
    data = path.read_bytes()
    text = gzip.decompress(data) if path.suffix == ".gz" else data
    events: list[dict[str, Any]] = json.loads(text)["traceEvents"]
    return events
