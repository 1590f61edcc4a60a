"""Draws what was measured, from the tables of benchmarks/results; no figure stands here.

    python docs/figures/measured.py

measured.png    bench_step.py: step time over the bare model, and peak memory, of each engine
memory.png      bench_step.py --peak-only: peak memory of each engine by number of ranks
host_time.png   bench_scale.py: host time of a unit and step by number of ranks
optimizer.png   bench_optimizer.py: clip and step; and the host's time by number of parameters
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
NAMES = {"layerzero": "layerzero", "fsdp1": "FSDP1", "fully_shard": "FSDP2\n(fully_shard)"}
COLOURS = {"layerzero": "#4c72b0", "fsdp1": "#dd8452", "fully_shard": "#55a868"}
_ALL = {**COLOURS, "ddp": "#8c8c8c"}
SPREAD = r"([\d.]+) \(([\d.]+)-([\d.]+)\)"


class Row(NamedTuple):
    """Of one engine and model: ms over the bare model with quartiles, and the peak in MB."""

    median: float
    low: float
    high: float
    peak: float


def read_steps(text: str) -> dict[str, dict[str, Row]]:
    """For each model, by its title, the rows of the engines.

    Raises:
        ValueError: an engine is missing from a table.
    """
    tables: dict[str, dict[str, Row]] = {}
    begin = r"^([\d.]+ M parameters)(?:, 2 ranks, 2 x 128)?;[^\n]*\n"
    for title, table in re.findall(begin + r"(.*?)^(?:```|$)", text, re.S | re.M):
        tables[title] = {}
        for engine in NAMES:
            row = re.search(rf"^{engine} +{SPREAD} +{SPREAD} +([\d.]+)$", table, re.M)
            if row is None:
                raise ValueError(f"no row of {engine} under {title!r}")
            tables[title][engine] = Row(*map(float, row.groups()[3:]))
    return tables


def read_peaks(text: str) -> dict[str, dict[int, dict[str, float]]]:
    """For each model and batch, number of ranks and engine, the peak in MB."""
    found: dict[str, dict[int, dict[str, float]]] = {}
    begin = r"^([\d.]+ M parameters), (\d+) ranks, ([\dx ]+);[^\n]*peak[^\n]*\n"
    for model, ranks, batch, table in re.findall(begin + r"(.*?)^$", text, re.S | re.M):
        rows = re.findall(r"^(\w+) .*?([\d.]+)$", table, re.M)
        by_ranks = found.setdefault(f"{model}, {batch} tokens", {})
        by_ranks[int(ranks)] = {name: float(peak) for name, peak in rows if name in _ALL}
    return found


Host = tuple[float, float, float]


def read_hosts(text: str) -> dict[str, dict[int, Host]]:
    """For each engine and number of ranks, microseconds of a unit and step, with quartiles."""
    found: dict[str, dict[int, Host]] = {}
    for engine in NAMES:
        for row in re.findall(rf"^{engine} +(\d+) +{SPREAD}", text, re.M):
            ranks, median, low, high = map(float, row)
            found.setdefault(engine, {})[int(ranks)] = median, low, high
    return found


def read_tables(text: str) -> Iterator[list[list[str]]]:
    """The cells of each table of a page, its header first."""
    for table in re.findall(r"(?:^\|.*\n)+", text, re.M):
        lines = [line for line in table.splitlines() if not re.fullmatch(r"[|\-: ]+", line)]
        yield [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def columns(tables: list[list[list[str]]], *names: str) -> dict[str, list[str]]:
    """Of the first table with these columns: the cells of each row, by its first cell.

    Raises:
        ValueError: there is none.
    """
    for header, *rows in tables:
        if {*names} <= {*header}:
            places = [header.index(name) for name in names]
            return {row[0]: [row[place] for place in places] for row in rows}
    raise ValueError(f"no table has the columns {names}")


def draw_steps(tables: dict[str, dict[str, Row]], path: Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(10, 2.8), dpi=130, layout="constrained", sharey=True)
    height = 0.8 / len(tables)
    for index, (title, rows) in enumerate(tables.items()):
        ys = [place + (0.5 - index) * height for place in range(len(NAMES))]
        found = [rows[engine] for engine in NAMES]
        errors = [[r.median - r.low for r in found], [r.high - r.median for r in found]]
        colour = ["#4c72b0", "#9fb7dc"][index % 2]
        style: dict[str, Any] = {"height": height, "color": colour, "label": title}
        axes[0].barh(ys, [r.median for r in found], xerr=errors, ecolor="0.3", **style)
        axes[1].barh(ys, [r.peak for r in found], **style)
    axes[0].set_yticks(range(len(NAMES)), [*NAMES.values()])
    axes[0].invert_yaxis()
    axes[0].set_xlabel("step time over the bare model, ms (quartiles)")
    axes[1].set_xlabel("peak memory of a rank, MB")
    axes[1].legend(frameon=False, fontsize=8)
    _save(figure, axes, path)


def draw_peaks(found: dict[str, dict[int, dict[str, float]]], path: Path) -> None:
    figure, axes = plt.subplots(
        1,
        len(found),
        figsize=(2.6 * len(found) + 1.4, 2.8),
        dpi=130,
        layout="constrained",
        squeeze=False,
    )
    for axis, (title, by_ranks) in zip(axes[0], found.items(), strict=True):
        engines = [name for name in _ALL if all(name in row for row in by_ranks.values())]
        width = 0.8 / len(engines)
        for index, name in enumerate(engines):
            places = [
                place + (index - (len(engines) - 1) / 2) * width for place in range(len(by_ranks))
            ]
            peaks = [row[name] for row in by_ranks.values()]
            label = NAMES.get(name, "DDP").replace("\n", " ")
            axis.bar(places, peaks, width, color=_ALL[name], label=label)
        axis.set_xticks(range(len(by_ranks)), [f"{ranks} ranks" for ranks in by_ranks])
        axis.set_title(title, fontsize=8)
    axes[0][0].set_ylabel("peak memory of a rank, MB")
    handles = axes[0][0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside right upper", frameon=False, fontsize=7)
    _save(figure, axes[0], path)


def draw_hosts(found: dict[str, dict[int, Host]], path: Path) -> None:
    figure, axis = plt.subplots(figsize=(6, 2.8), dpi=130, layout="constrained")
    sizes = sorted(found["layerzero"])
    width = 0.8 / len(found)
    for index, (engine, own) in enumerate(found.items()):
        medians = [own[size][0] for size in sizes]
        errors = [[own[s][0] - own[s][1] for s in sizes], [own[s][2] - own[s][0] for s in sizes]]
        style: dict[str, Any] = {
            "color": COLOURS[engine],
            "label": NAMES[engine].replace("\n", " "),
        }
        places = [place + (index - (len(found) - 1) / 2) * width for place in range(len(sizes))]
        axis.bar(places, medians, width, yerr=errors, ecolor="0.3", **style)
    axis.set_xticks(range(len(sizes)), [f"{size} ranks" for size in sizes])
    axis.set_ylabel("host time of a unit\nand step, us (quartiles)")
    axis.legend(frameon=False, fontsize=8)
    _save(figure, [axis], path)


def draw_optimizers(text: str, path: Path) -> None:
    tables = [*read_tables(text)]
    parts = ("clip", "step")
    shown = columns(tables, *parts)
    hosts = columns(tables, "192 parameters: norm / clip / step / zero_grad", "1,536 parameters")
    figure, axes = plt.subplots(1, 2, figsize=(10, 3), dpi=130, layout="constrained", sharey=True)
    names = [name for name in shown if name in hosts]
    starts = [0.0] * len(names)
    for place, part in enumerate(parts):
        widths = [float(shown[name][place]) for name in names]
        axes[0].barh(names, widths, left=starts, label=part, color=["#9fb7dc", "#4c72b0"][place])
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    for index, count in enumerate((192, 1536)):
        steps = [float(hosts[name][index].split("/")[2]) for name in names]
        ys = [place + (index - 0.5) * 0.4 for place in range(len(names))]
        axes[1].barh(
            ys, steps, 0.4, color=["#9fb7dc", "#4c72b0"][index], label=f"{count} parameters"
        )
    axes[0].invert_yaxis()
    axes[0].set_xlabel("clip + step of 25 million elements, ms")
    axes[1].set(
        xlabel="host time of a step of small parameters, ms", xscale="log", xlim=(0.1, None)
    )
    for axis in axes:
        axis.legend(frameon=False, fontsize=8)
    _save(figure, axes, path)


def _save(figure: Any, axes: Any, path: Path) -> None:
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder")
    out = parser.parse_args().out
    draw_steps(read_steps(max(RESULTS.glob("step_*.md")).read_text()), out / "measured.png")
    draw_peaks(read_peaks(max(RESULTS.glob("peak_*.md")).read_text()), out / "memory.png")
    draw_hosts(read_hosts(max(RESULTS.glob("scale_*.md")).read_text()), out / "host_time.png")
    draw_optimizers(max(RESULTS.glob("optimizer_*.md")).read_text(), out / "optimizer.png")


if __name__ == "__main__":
    main()
