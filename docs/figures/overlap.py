"""Draws overlap.png: one training step on two CPU ranks, communication beside compute.

    python docs/figures/overlap.py

Everything is measured: rank 0 of two gloo ranks records a step with torch's profiler, and the bars
are the ranges of docs/howto/profile.md. A gather lasts from `unshard` to the end of
`wait_for_unshard`, a reduction from `reduce` until its last message was received; compute of a unit
lies between its `wait_for_unshard` and its `reshard`. Of several steps the fastest is drawn.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from style import UNITS, figure, save
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "benchmarks")]

from benchmarks.common import run_on_ranks  # noqa: E402
from layerzero import ZeRO3  # noqa: E402

WIDTH, HIDDEN, ROWS, NUM_UNITS, NUM_STEPS = 512, 2048, 512, 4, 25
ROW_NAMES = ["reductions", "compute", "gathers"]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Bar(NamedTuple):
    row: str
    unit: int
    start: float
    end: float


class Step(NamedTuple):
    bars: list[Bar]
    """Times in ms from the start of the step."""
    forward_end: float
    end: float


Range = tuple[str, float, float]


def record() -> list[list[Range]]:
    """On each rank: the named ranges of each recorded step, in order of their start."""
    torch.manual_seed(0)
    model = ZeRO3(nn.Sequential(*(Layer() for _ in range(NUM_UNITS))), auto_wrap_policy={Layer})
    batch = torch.randn(ROWS, WIDTH)
    steps = []
    for index in range(2 + NUM_STEPS):
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            with record_function("forward"):
                loss = model(batch).square().mean()
            with record_function("backward"):
                loss.backward()
        named = [
            (event.name, event.time_range.start / 1e3, event.time_range.end / 1e3)
            for event in profiler.events()
            if re.match(r"LayerZeRO3\.|forward$|backward$|gloo:recv", event.name)
        ]
        if index >= 2:  # the order is known
            steps.append(sorted(named, key=lambda each: each[1]))
    return steps


def read(ranges: list[Range]) -> Step:
    """The bars of one step."""
    phases = {name: (start, end) for name, start, end in ranges if name in ("forward", "backward")}
    begin = phases["forward"][0]
    bars: list[Bar] = []
    issued: dict[int, float] = {}
    computes: dict[int, float] = {}
    last = NUM_UNITS - 1  # stays full between forward and backward
    for name, start, end in ranges:
        found = re.fullmatch(r"LayerZeRO3\.(\w+)\((\d+)\)", name)
        if name == "backward":
            bars.append(Bar("compute", last, computes[last], phases["forward"][1]))
            computes[last] = start
        if found is None:
            continue
        verb, unit = found[1], int(found[2])
        if verb == "unshard":
            issued[unit] = start
        elif verb == "wait_for_unshard" and unit in issued:
            bars.append(Bar("gathers", unit, issued.pop(unit), end))
            computes[unit] = end
        elif verb == "reshard":
            bars.append(Bar("compute", unit, computes.pop(unit), start))
        elif verb == "reduce":
            received = [e for n, s, e in ranges if n == "gloo:recv" and start <= s <= end]
            bars.append(Bar("reductions", unit, start, max(received)))
    bars = [bar._replace(start=bar.start - begin, end=bar.end - begin) for bar in bars]
    return Step(bars, phases["forward"][1] - begin, max(bar.end for bar in bars))


def draw(step: Step, path: Path) -> None:
    drawn, axes = figure(3.0)
    for bar in step.bars:
        y, height = float(ROW_NAMES.index(bar.row)), 0.62
        if bar.row == "gathers":  # two may be under way at once
            y, height = y + 0.17 - 0.34 * (bar.unit % 2), 0.31
        axes.barh(
            y,
            bar.end - bar.start,
            left=bar.start,
            height=height,
            color=UNITS[bar.unit],
            alpha=1.0 if bar.row == "compute" else 0.75,
            edgecolor="white",
        )
        if bar.end - bar.start > 0.025 * step.end:
            axes.text((bar.start + bar.end) / 2, y, bar.unit, ha="center", va="center")
    axes.axvline(step.forward_end, color="0.4", linewidth=0.8, linestyle="--")
    axes.text(step.forward_end / 2, 2.45, "forward", ha="center", va="bottom")
    middle = (step.forward_end + step.end) / 2
    axes.text(middle, 2.45, "backward", ha="center", va="bottom")
    axes.set_yticks(range(len(ROW_NAMES)), ROW_NAMES)
    axes.set_xlim(0, step.end)
    axes.set_ylim(-0.45, 2.75)
    axes.set_xlabel("ms; a colour and number is a unit")
    save(drawn, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("overlap.png"))
    steps = [read(ranges) for ranges in run_on_ranks(2, record)[0]]
    draw(min(steps, key=lambda step: step.end), parser.parse_args().out)


if __name__ == "__main__":
    main()
