"""A picture of one step: the lanes of a rank, and why compute waited."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from pathlib import Path

from layerzero.step_ledger.figures import Explained
from layerzero.step_ledger.records import (
    HOST_BOUND,
    ISSUED_LATE,
    LIMITER,
    PEER_LATE,
    PREVIOUS,
    TRANSFER,
    Record,
    Slice,
    Wait,
)
from layerzero.step_ledger.trace import spans

_COLOURS = {
    ISSUED_LATE: "#c44e52",
    LIMITER: "#937860",
    PREVIOUS: "#8172b3",
    HOST_BOUND: "#222222",
    PEER_LATE: "#ccb974",
    TRANSFER: "#f2c14e",
}
_OF_KIND = {"gather": "#64b5cd", "reduction": "#da8bc3"}
_OF_PHASE = {"forward": "#dddddd", "backward": "#bbbbbb"}
_ROOT = "the root unit"
_LANES = {"gathers": 3.0, "compute": 2.0, "compute waits": 1.0, "reductions": 0.0}


def draw(explained: Explained, rank: int, path: str | Path) -> None:
    """Draw the step of median length.

    Raises:
        ImportError: matplotlib is not installed.
        RuntimeError: no step ran.
    """
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
        axes.barh(_LANES[lane], width, 0.7, left, color=colour, edgecolor="white", linewidth=0.4)
        # About 80 characters fit into the width of the picture.
        if text and len(text) + 1 < 80 * (stop - start) / (end - begin):
            axes.text(left + width / 2, _LANES[lane], text, ha="center", va="center")

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
                bar("compute waits", segment.begin, segment.end, _COLOURS[segment.reason])
                waited[segment.reason] += (min(segment.end, end) - segment.begin) * 1e3
    legend = _OF_PHASE | {f"{why}, {waited[why]:.2g} ms": _COLOURS[why] for why in waited}
    for label, colour in legend.items():
        axes.barh(0, 0, color=colour, label=label)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, handlelength=1.2)
    axes.set_yticks(list(_LANES.values()), list(_LANES))
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
