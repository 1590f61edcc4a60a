"""Draws measured.png: step time and peak memory of each engine, from the results of bench_step.py.

    python docs/figures/measured.py

No figure stands here: the bars are the tables of benchmarks/results/step_*.md.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
ENGINES = ["layerzero", "fsdp1", "fully_shard"]
NAMES = {"layerzero": "layerzero", "fsdp1": "FSDP1", "fully_shard": "FSDP2\n(fully_shard)"}
SPREAD = r"([\d.]+) \(([\d.]+)-([\d.]+)\)"


class Row(NamedTuple):
    """Of one engine and model: ms over the bare model with quartiles, and the peak in MB."""

    median: float
    low: float
    high: float
    peak: float


def read(text: str) -> dict[str, dict[str, Row]]:
    """For each model, by its title, the rows of the engines."""
    tables: dict[str, dict[str, Row]] = {}
    for title, table in re.findall(r"^([\d.]+ M parameters)[^\n]*\n(.*?)^```", text, re.S | re.M):
        tables[title] = {}
        for engine in ENGINES:
            row = re.search(rf"^{engine} +{SPREAD} +{SPREAD} +([\d.]+)$", table, re.M)
            if row is None:
                raise ValueError(f"no row of {engine} under {title!r}")
            tables[title][engine] = Row(*map(float, row.groups()[3:]))
    return tables


def draw(tables: dict[str, dict[str, Row]], path: Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(10, 2.8), dpi=130, layout="constrained", sharey=True)
    height = 0.8 / len(tables)
    for index, (title, rows) in enumerate(tables.items()):
        ys = [place + (0.5 - index) * height for place in range(len(ENGINES))]
        found = [rows[engine] for engine in ENGINES]
        errors = [[r.median - r.low for r in found], [r.high - r.median for r in found]]
        colour = ["#4c72b0", "#9fb7dc"][index % 2]
        style = {"height": height, "color": colour, "label": title}
        axes[0].barh(ys, [r.median for r in found], xerr=errors, ecolor="0.3", **style)
        axes[1].barh(ys, [r.peak for r in found], **style)
    axes[0].set_yticks(range(len(ENGINES)), [NAMES[engine] for engine in ENGINES])
    axes[0].invert_yaxis()
    axes[0].set_xlabel("step time over the bare model, ms (quartiles)")
    axes[1].set_xlabel("peak memory of a rank, MB")
    axes[1].legend(frameon=False, fontsize=8)
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("measured.png"))
    results = max(RESULTS.glob("step_*.md"))
    draw(read(results.read_text()), parser.parse_args().out)


if __name__ == "__main__":
    main()
