"""Does a training step on a GPU overlap as docs/internals/streams.md draws it? Reads a trace.

The trace is one of torch.profiler in Chrome's format. Steps are ranges whose name begins with
`STEP`; units and what the engine does for them are its own ranges, "LayerZeRO3.unshard(layers.3)".
Work on the device belongs to the range in which the host launched it.

    python benchmarks/gpu_trace.py trace.json
"""

from __future__ import annotations

import argparse
import bisect
import gzip
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

STEP = "bench_step"
MIN_HIDDEN = 0.9
"""Of the time of gathers, the least part that must run beside kernels of the compute stream."""
MAX_GAP_US = 50.0
OWN_KERNELS = 1
"""The engine's kernels for each unit and step, besides a cast for each gather: the packing of
gradients."""
_AT_ONCE_US = 5.0
"""Between a work's cause on another stream and the work, at most, apart from launching it."""

_RANGE = re.compile(r"LayerZeRO3\.(\w+)\((.*)\)")
_COLLECTIVE = re.compile(r"nccl|oneRank|link_copy|memcpy.*(dtod|device -> device)", re.IGNORECASE)
_SPIN = "spin_kernel"
"""Of torch.cuda._sleep."""
_BLOCKING = re.compile(
    r"cuda(Stream|Device|Event)Synchronize|cudaMemcpy|cudaMemset|cudaMalloc|cudaFree|cudaHostAlloc"
    r"|cuMemCreate|cuMemMap|cuMemUnmap|cuCtxSynchronize|cuStreamSynchronize"
)


CHECKS = ("gathers", "gathers on compute", "hidden", "order", "own kernels", "gaps", "host")


class Failure(NamedTuple):
    """One way in which a step is not as drawn."""

    check: str
    """One of `CHECKS`."""
    text: str


@dataclass(frozen=True)
class Work:
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

    @property
    def is_collective(self) -> bool:
        return bool(_COLLECTIVE.search(self.name))

    @property
    def is_gather(self) -> bool:
        return self.action == "unshard" and self.is_collective

    @property
    def is_reduction(self) -> bool:
        return self.action == "reduce" and self.is_collective

    @property
    def is_own_kernel(self) -> bool:
        of_engine = self.action in ("unshard", "reduce")
        return of_engine and not self.is_collective and _SPIN not in self.name

    @property
    def what(self) -> str:
        kind = "gather" if self.is_gather else "reduction" if self.is_reduction else self.action
        return f"{self.unit}'s {kind}" if self.action else self.name[:60]


class Note(NamedTuple):
    """One of the engine's ranges, on the host."""

    action: str
    unit: str
    start: float
    end: float


@dataclass(frozen=True)
class Step:
    """One step of a trace."""

    works: Sequence[Work]
    """In the order in which they were launched."""
    notes: Sequence[Note]
    """In the order in which they began."""
    calls: Sequence[str]
    """Names of the calls of CUDA's runtime that can block the host."""

    @property
    def compute_stream(self) -> int:
        """The stream on which the model's own kernels take the most time."""
        busy: Counter[int] = Counter()
        for work in self.works:
            if not work.action:
                busy[work.stream] += int(1e3 * (work.end - work.start))
        if not busy:
            raise ValueError("a step without kernels of the model: was the device profiled?")
        return busy.most_common(1)[0][0]


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
    ranges = [event for event in notes if _RANGE.match(event["name"])]
    runtime = [e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")]
    launches = {e["args"]["correlation"]: e for e in runtime if "correlation" in e.get("args", {})}
    find = _finder(ranges)
    works = []
    for event in events:
        if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        launch = launches.get(event["args"].get("correlation"))
        if launch is not None:
            action, unit = find(launch)
            works.append(
                Work(
                    event["name"],
                    event["args"]["stream"],
                    event["ts"],
                    event["ts"] + event["dur"],
                    launch["ts"],
                    action,
                    unit,
                )
            )
    works.sort(key=lambda work: work.launched)
    named = [
        Note(*_RANGE.match(e["name"]).groups(), e["ts"], e["ts"] + e["dur"])  # type: ignore
        for e in ranges
    ]
    return [
        Step(
            [work for work in works if _holds(step, work.launched)],
            sorted((n for n in named if _holds(step, n.start)), key=lambda note: note.start),
            [e["name"] for e in runtime if _holds(step, e["ts"]) and _blocks(e["name"])],
        )
        for step in sorted(steps, key=lambda step: step["ts"])
    ]


def _holds(event: dict[str, Any], time: float) -> bool:
    return bool(event["ts"] <= time <= event["ts"] + event["dur"])


def _blocks(name: str) -> bool:
    return bool(_BLOCKING.fullmatch(name))


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


def check_step(step: Step, own_kernels: int = OWN_KERNELS) -> list[Failure]:
    """Everything in which one step is not as drawn; [] if all is well."""
    gathers = [work for work in step.works if work.is_gather]
    if not gathers:
        return [Failure("gathers", "the step has no gather: are the engine's ranges there?")]
    compute = compute_of(step)
    return [
        *_gathers_on_compute(step, gathers),
        *_hidden(gathers, compute),
        *_order(step),
        *_own_kernels(step, own_kernels),
        *_gaps(step, compute),
        *(Failure("host", f"{name} within the step") for name in sorted(set(step.calls))),
    ]


def compute_of(step: Step) -> list[Work]:
    """What ran on the compute stream, in order of time."""
    on_stream = [work for work in step.works if work.stream == step.compute_stream]
    return sorted(on_stream, key=lambda work: work.start)


def _gathers_on_compute(step: Step, gathers: Sequence[Work]) -> list[Failure]:
    wrong = [work.unit for work in gathers if work.stream == step.compute_stream]
    text = f"{len(wrong)} gathers on the compute stream, first of {wrong[0]}" if wrong else ""
    return [Failure("gathers on compute", text)] if wrong else []


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


def _hidden(gathers: Sequence[Work], compute: Sequence[Work]) -> list[Failure]:
    part = hidden_part(gathers, compute)
    text = f"{part:.2f} of the time of gathers beside compute, expected {MIN_HIDDEN} or more"
    return [Failure("hidden", text)] if part < MIN_HIDDEN else []


def collectives_of(step: Step) -> list[tuple[str, str]]:
    """("G" or "R", unit), in the order of issue; one unit's twice in a row count once."""
    sequence = [
        ("G" if work.is_gather else "R", work.unit)
        for work in step.works
        if work.is_gather or work.is_reduction
    ]
    return [each for at, each in enumerate(sequence) if at == 0 or each != sequence[at - 1]]


def _order(step: Step) -> list[Failure]:
    """As "Backward, BACKWARD_PRE" in streams.md: G3 G2 R3 G1 R2 R1 RR."""
    sequence = collectives_of(step)
    first_reduction = next((at for at, (kind, _) in enumerate(sequence) if kind == "R"), None)
    if first_reduction is None:
        return [Failure("order", "the step has no reduction")]
    units = list(dict.fromkeys(unit for kind, unit in sequence if kind == "G"))
    reduced = [unit for kind, unit in sequence if kind == "R"]
    # The root may be gathered first, and comes last in backward either way.
    if reduced != [unit for unit in reversed(units) if unit in set(reduced)]:
        text = f"reduced {' '.join(reduced)}; expected the reverse of {' '.join(units)}"
        return [Failure("order", text)]
    found = []
    for at, (kind, unit) in enumerate(sequence):
        following = reduced[reduced.index(unit) + 1 :] if kind == "R" else []
        again = [other for kind_, other in sequence[at + 1 :] if kind_ == "G"]
        if following and following[0] in again:
            found.append(
                Failure("order", f"{following[0]} is gathered after the reduction of {unit} began")
            )
    return found[:1]


def _own_kernels(step: Step, expected: int) -> list[Failure]:
    counted = Counter(work.unit for work in step.works if work.is_own_kernel)
    casts = Counter(work.unit for work in step.works if work.is_gather)
    wrong = [unit for unit in sorted(casts) if counted[unit] != casts[unit] + expected]
    if not wrong:
        return []
    text = (
        f"{counted[wrong[0]]} own kernels for {wrong[0]}, expected "
        f"{casts[wrong[0]] + expected} ({len(wrong)} units differ)"
    )
    return [Failure("own kernels", text)]


def _gaps(step: Step, compute: Sequence[Work]) -> list[Failure]:
    """Idle times of compute between two kernels, where the host was at a unit's border between."""
    borders = sorted(time for note in step.notes for time in (note.start, note.end))
    gaps = []
    before = compute[0]
    for work in compute[1:]:
        gap = work.start - before.end
        left = bisect.bisect_right(borders, before.launched)
        right = bisect.bisect_left(borders, work.launched)
        if gap > MAX_GAP_US and right > left:
            gaps.append((gap, before, work))
        if work.end > before.end:
            before = work
    if not gaps:
        return []
    gaps.sort(key=lambda each: -each[0])
    text = (
        f"{len(gaps)} gaps over {MAX_GAP_US:.0f} us at borders of units, up to {gaps[0][0]:.0f} us"
    )
    reasons = Counter(_why_idle(step, before, work) for _, before, work in gaps)
    listed = [f"{count} x {why}" if count > 1 else why for why, count in reasons.most_common(4)]
    return [Failure("gaps", f"{text}: {'; '.join(listed)}")]


def _why_idle(step: Step, before: Work, first: Work) -> str:
    """Why nothing ran on compute between two works of it."""
    waits = [n for n in step.notes if n.action == "wait_for_unshard" and n.end <= first.launched]
    if waits and waits[-1].end > before.launched:
        unit, at = waits[-1].unit, waits[-1].start
        gathers = [w for w in step.works if w.is_gather and w.unit == unit and w.launched < at]
        if gathers and gathers[-1].end > before.end + MAX_GAP_US:
            late = gathers[-1].end - before.end
            text = f"{unit}'s gather ended {late:.0f} us after the unit before finished"
            return f"{text}: {_why_late(step, waits[:-1], gathers[-1])}"
    if first.launched > before.end:
        return f"the host launched {first.name[:40]} {first.launched - before.end:.0f} us too late"
    others = [work for work in step.works if work.stream != first.stream]
    shared = [(min(w.end, first.start) - max(w.start, before.end), w) for w in others]
    overlap, other = max(shared, key=lambda each: each[0], default=(0.0, first))
    if overlap > (first.start - before.end) / 2:
        return f"{other.what} held the device"
    return f"nothing that the trace shows, before {first.name[:40]}"


def _why_late(step: Step, waits: Sequence[Note], gather: Work) -> str:
    """What a gather came after: the last that ended before it began."""
    earlier = [work for work in step.works if work.launched < gather.launched]
    causes = [(gather.launched, "the host issued it")]
    for work in earlier:
        if work.stream == gather.stream:
            causes.append((work.end, f"{work.what} left the link"))
        elif work.action == "unshard" and work.unit == gather.unit and not work.is_collective:
            causes.append((work.end, "its shard was cast"))
    freed = [n for n in step.notes if n.action == "reshard" and n.start < gather.launched][-1:]
    used = [w for w in earlier if freed and w.launched < freed[0].start and not w.action]
    if used:
        causes.append((used[-1].end, f"memory of {freed[0].unit} was freed"))
    when, why = max(each for each in causes if each[0] <= gather.start + _AT_ONCE_US)
    began = waits[-1].end if waits else gather.launched
    run_beside = [w for w in step.works if not w.action and w.launched > began]
    if waits and run_beside and when <= run_beside[0].start + _AT_ONCE_US:
        takes = gather.end - gather.start
        return f"it takes {takes:.0f} us, longer than {waits[-1].unit} computes, from when {why}"
    return f"it began late, when {why}"


def load(path: Path) -> list[dict[str, Any]]:
    """The events of a trace file, packed by gzip or not."""
    data = path.read_bytes()
    text = gzip.decompress(data) if path.suffix == ".gz" else data
    events: list[dict[str, Any]] = json.loads(text)["traceEvents"]
    return events


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--own-kernels", type=int, default=OWN_KERNELS)
    args = parser.parse_args()
    failures = [
        failure
        for step in read_steps(load(args.trace))
        for failure in check_step(step, args.own_kernels)
    ]
    for failure in failures:
        print(f"{failure.check}: {failure.text}")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
