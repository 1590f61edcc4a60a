"""What grows with the number of ranks: host time, construction, bytes on a rank?

Rank 0 of torch's fake process group, which moves no bytes. Fake collectives take longer in larger
groups, so every one of them runs in a group of two ranks, on 64 elements, for each engine alike
(bench_host_overhead.py explains). What still grows is an engine's own.

Host time: models for all numbers of ranks live in one process, in subgroups of the largest world,
and take turns in each round, so a ratio between two numbers of ranks is within one round. Two
things that are no work of an engine would show in it, and do not:
- Padding. A unit of 63 columns has 16,128 elements, 16,384 when padded for 4096 ranks: buffers
  are of almost the same size in all worlds. With 16 columns these were 1,088 and 16,384.
- Page faults. The C library may return a freed buffer to the system and have a fault for each 4 KB
  of the next one, or may not, by what lies beside it: 0 to 70 faults a unit and step in one and the
  same program. Here it keeps what is freed.
Construction and bytes: a process of its own for each, because both depend on what was there before.
Bytes are those of bench_step.py's model and AdamW (memory.py), with one sequence of 64 tokens.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_host_overhead import Unit, stub_collectives
from common import (
    SIZES,
    Spread,
    difference,
    in_own_process,
    interleave,
    join_fake_world,
    options,
    print_json,
    print_result,
    print_table,
    ratio,
)
from engines import ENGINES, TransformerBlock, layerzero, make_transformer, training
from memory import resting_and_peak_bytes
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

COMPARED = ("layerzero", "fully_shard")
# glibc's: no freed block below 32 MB (its largest limit), and no 1 GB, goes back to the system.
_KEEP_FREED = {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**30)}


def main() -> None:
    parser = options(__doc__, COMPARED, width=63, units=24, rounds=11, steps=4, size="6m")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512, 4096])
    parser.add_argument("--built-units", type=int, default=100, help="of the model constructed")
    parser.add_argument("--measure", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure is not None:
        kind, *rest = args.measure
        print_json(measure_bytes(args, *rest) if kind == "bytes" else measure_host(args))
        return
    host = in_own_process("host", variables=_KEEP_FREED)
    cells = {
        (engine, ranks): {
            "host_us": host[engine][str(ranks)],
            **_built(engine, ranks, args),
            **in_own_process("bytes", engine, str(ranks)),
        }
        for engine in args.engines
        for ranks in args.ranks
    }
    _show(args, cells, host)
    print_result(
        args,
        growth_of_host_time={name: host[name]["growth"] for name in args.engines},
        engines={
            engine: {str(ranks): cells[engine, ranks] for ranks in args.ranks}
            for engine in args.engines
        },
    )


# Measured in processes of their own -------------------------------------------------------------


def measure_host(args: argparse.Namespace) -> dict[str, Any]:
    """Microseconds of a unit and step over the bare model, by engine and number of ranks."""
    _join(max(args.ranks))
    groups = {ranks: dist.new_group(list(range(ranks))) for ranks in args.ranks}
    pair = dist.new_group([0, 1])
    names = [f"{engine} {ranks}" for engine in args.engines for ranks in args.ranks]
    steps = {
        name: _host_step(args, engine, groups[int(ranks)])
        for name in names
        for engine, ranks in [name.split()]
    }
    steps["bare 1"] = _host_step(args, "bare", None)
    for step in steps.values():
        step()
    stub_collectives(pair)

    def step_us(name: str) -> float:
        gc.collect()
        start = time.process_time()
        for _ in range(args.steps):
            steps[name]()
        return (time.process_time() - start) / args.steps / args.units * 1e6

    times = interleave([*steps], step_us, args.rounds, warmup=2)
    found: dict[str, Any] = {}
    for engine in args.engines:
        over = {r: difference(times[f"{engine} {r}"], times["bare 1"]) for r in args.ranks}
        found[engine] = {str(r): Spread.of(values).as_dict() for r, values in over.items()}
        growth = ratio(over[args.ranks[-1]], over[args.ranks[0]])
        found[engine]["growth"] = growth.as_dict()
    return found


def _host_step(
    args: argparse.Namespace, engine: str, group: dist.ProcessGroup | None
) -> Callable[[], None]:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(Unit(args.width) for _ in range(args.units)))
    if engine == "layerzero":
        model = layerzero(model, Unit, process_group=group)
    elif engine == "fully_shard":
        model = ENGINES[engine](model, Unit, mesh=DeviceMesh.from_group(group, "cpu"))
    batch = torch.randn(1, args.width)

    def step() -> None:
        model(batch).sum().backward()
        model.zero_grad()

    return step


def measure_bytes(args: argparse.Namespace, engine: str, ranks: str) -> dict[str, float]:
    """Megabytes that model and AdamW hold between steps, and the peak in a step."""
    _join(int(ranks))
    _bytes_step(engine, *SIZES["tiny"])()  # Imports and caches do not count.
    pair = dist.new_group([0, 1])

    def prepare() -> Callable[[], object]:
        step = _bytes_step(engine, *SIZES[args.size])
        step()  # compares ranks, for one
        stub_collectives(pair)
        return step

    held = resting_and_peak_bytes(prepare)
    return {"resting_mb": held.resting / 1e6, "peak_mb": held.peak / 1e6}


def _bytes_step(engine: str, width: int, layers: int) -> Callable[[], object]:
    model = ENGINES[engine](make_transformer((width, layers), 128), TransformerBlock)
    return training(model, lambda: torch.zeros(1, 65, dtype=torch.long))


def _join(ranks: int) -> None:
    # No gather fills a buffer here: whatever lies in it must not slow down what computes with it.
    torch.set_flush_denormal(True)
    join_fake_world(ranks)


def _built(engine: str, ranks: int, args: argparse.Namespace) -> dict[str, float]:
    script = str(Path(__file__).with_name("bench_construction.py"))
    command = [script, "--units", str(args.built_units)]
    found = in_own_process(engine, str(ranks), command=command)
    return {
        "cpu_seconds": found["cpu_seconds"],
        "peak_mb_of_construction": found["peak_mb"],
    }


# The result -----------------------------------------------------------------------------------


def _show(
    args: argparse.Namespace, cells: dict[tuple[str, int], dict[str, Any]], host: dict[str, Any]
) -> None:
    header = ["engine", "ranks", "host us (quartiles)", "construction CPU s", "its peak MB"]
    header += ["at rest MB", "peak in a step MB"]
    rows = []
    for (engine, ranks), cell in cells.items():
        row = [engine, str(ranks), Spread(**cell["host_us"]).text(0)]
        row += [f"{cell['cpu_seconds']:.2f}", f"{cell['peak_mb_of_construction']:.0f}"]
        rows.append([*row, f"{cell['resting_mb']:.1f}", f"{cell['peak_mb']:.1f}"])
    print_table(header, rows)
    most, fewest = max(args.ranks), min(args.ranks)
    for engine in args.engines:
        growth = Spread(**host[engine]["growth"]).text()
        print(f"{engine}: host time at {most} ranks over that at {fewest}: {growth}")


if __name__ == "__main__":
    main()
