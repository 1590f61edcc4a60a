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

from style import ENGINES, NAMES, figure, pale, save

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
SHARDED = ("layerzero", "fsdp1", "fully_shard")
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
    begin = r"^([\d.]+ M parameters), bf16, 2 ranks, 2 x 128;[^\n]*\n"
    for title, table in re.findall(begin + r"(.*?)^(?:```|$)", text, re.S | re.M):
        tables[title] = {}
        for engine in SHARDED:
            row = re.search(rf"^{engine} +{SPREAD} +{SPREAD} +([\d.]+)$", table, re.M)
            if row is None:
                raise ValueError(f"no row of {engine} under {title!r}")
            tables[title][engine] = Row(*map(float, row.groups()[3:]))
    return tables


def read_peaks(text: str) -> dict[str, dict[int, dict[str, float]]]:
    """For each model and batch, number of ranks and engine, the peak in MB."""
    found: dict[str, dict[int, dict[str, float]]] = {}
    begin = r"^([\d.]+ M parameters), bf16, (\d+) ranks, ([\dx ]+);[^\n]*peak[^\n]*\n"
    for model, ranks, batch, table in re.findall(begin + r"(.*?)^$", text, re.S | re.M):
        rows = re.findall(r"^(\w+) .*?([\d.]+)$", table, re.M)
        by_ranks = found.setdefault(f"{model}, {batch} tokens", {})
        by_ranks[int(ranks)] = {name: float(peak) for name, peak in rows if name in NAMES}
    return found


Host = tuple[float, float, float]


def read_hosts(text: str) -> dict[str, dict[int, Host]]:
    """For each engine and number of ranks, microseconds of a unit and step, with quartiles."""
    found: dict[str, dict[int, Host]] = {}
    for engine in SHARDED:
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
    drawn, axes = figure(3.4, columns=2, sharey=True)
    height = 0.8 / len(tables)
    for index, (title, rows) in enumerate(tables.items()):
        ys = [place + (0.5 - index) * height for place in range(len(SHARDED))]
        found = [rows[engine] for engine in SHARDED]
        errors = [[r.median - r.low for r in found], [r.high - r.median for r in found]]
        colours: list[Any] = [ENGINES[engine] for engine in SHARDED]
        if index % 2:
            colours = [pale(colour) for colour in colours]
        axes[0].barh(
            ys, [r.median for r in found], height, xerr=errors, ecolor="0.3", color=colours
        )
        bars = axes[1].barh(ys, [r.peak for r in found], height, color=colours)
        axes[1].bar_label(bars, [title.replace(" parameters", "")] * 3, padding=3, fontsize=9)
    names = [NAMES[engine].replace(" ", "\n") for engine in SHARDED]
    axes[0].set_yticks(range(len(SHARDED)), names)
    axes[0].invert_yaxis()
    axes[0].set_xlabel("step time over the bare\nmodel, ms (quartiles)")
    axes[1].set_xlabel("peak memory of a rank, MB,\nby millions of parameters")
    axes[1].margins(x=0.22)
    save(drawn, path)


def draw_peaks(found: dict[str, dict[int, dict[str, float]]], path: Path) -> None:
    drawn, axes = figure(3.4, columns=len(found), squeeze=False)
    for axis, (title, by_ranks) in zip(axes[0], found.items(), strict=True):
        engines = [name for name in NAMES if all(name in row for row in by_ranks.values())]
        width = 0.8 / len(engines)
        for index, name in enumerate(engines):
            shift = (index - (len(engines) - 1) / 2) * width
            peaks = [row[name] for row in by_ranks.values()]
            places = [place + shift for place in range(len(by_ranks))]
            axis.bar(places, peaks, width, color=ENGINES[name], label=NAMES[name])
        axis.set_xticks(range(len(by_ranks)), [f"{ranks} ranks" for ranks in by_ranks])
        axis.set_title(title.replace(" parameters, ", " parameters,\n"), fontsize=11)
    axes[0][0].set_ylabel("peak memory of a rank, MB")
    handles = axes[0][0].get_legend_handles_labels()
    drawn.legend(*handles, loc="outside lower center", ncols=4, columnspacing=1.2)
    save(drawn, path)


def draw_hosts(found: dict[str, dict[int, Host]], path: Path) -> None:
    drawn, axis = figure(3.0)
    sizes = sorted(found["layerzero"])
    width = 0.8 / len(found)
    for index, (engine, own) in enumerate(found.items()):
        medians = [own[size][0] for size in sizes]
        errors = [[own[s][0] - own[s][1] for s in sizes], [own[s][2] - own[s][0] for s in sizes]]
        style: dict[str, Any] = {"color": ENGINES[engine], "label": NAMES[engine]}
        places = [place + (index - (len(found) - 1) / 2) * width for place in range(len(sizes))]
        axis.bar(places, medians, width, yerr=errors, ecolor="0.3", **style)
    axis.set_xticks(range(len(sizes)), [f"{size} ranks" for size in sizes])
    axis.set_ylabel("host time of a unit\nand step, us (quartiles)")
    axis.legend()
    save(drawn, path)


def draw_optimizers(text: str, path: Path) -> None:
    tables = [*read_tables(text)]
    shown = columns(tables, "clip", "step")
    hosts = columns(tables, "192 parameters: norm / clip / step / zero_grad", "1,536 parameters")
    names = [name for name in shown if name in hosts]
    full = [ENGINES["fully_shard" if "DTensor" in name else "layerzero"] for name in names]
    drawn, axes = figure(4.4, columns=2, sharey=True)
    labels = {
        name: name.replace("pieces, ", "torch ").replace("DTensors, ", "FSDP2, torch ")
        for name in names
    }
    clips, steps = ([float(shown[name][place]) for name in names] for place in (0, 1))
    axes[0].barh(range(len(names)), clips, color=[*map(pale, full)])
    axes[0].barh(range(len(names)), steps, left=clips, color=full)
    for index, colours in enumerate(([*map(pale, full)], full)):
        times = [float(hosts[name][index].split("/")[2]) for name in names]
        ys = [place + (index - 0.5) * 0.4 for place in range(len(names))]
        axes[1].barh(ys, times, 0.4, color=colours)
    axes[0].set_yticks(range(len(names)), [labels[name] for name in names])
    axes[0].invert_yaxis()
    axes[0].set_xlabel("ms for 25 million elements:\nclip (pale) and step")
    axes[1].set(xscale="log", xlim=(0.1, None))
    axes[1].set_xlabel("host's ms for a step of\n192 (pale), 1,536 parameters")
    save(drawn, path)


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
