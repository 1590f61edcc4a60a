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
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_host_overhead import Unit, stub_collectives
from bench_step import SIZES
from common import (
    Spread,
    add_engine_flag,
    difference,
    environment,
    interleave,
    print_json,
    print_table,
    ratio,
)
from engines import ENGINES, Transformer, TransformerBlock
from memory import resting_and_peak_bytes
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

COMPARED = ("layerzero", "fully_shard")
HERE = Path(__file__).parent
# glibc's: no freed block below 32 MB (its largest limit), and no 1 GB, goes back to the system.
_KEEP_FREED = {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**30)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_engine_flag(parser, COMPARED)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512, 4096])
    parser.add_argument("--units", type=int, default=24, help="of the model whose host time counts")
    parser.add_argument("--width", type=int, default=63, help="of its layers (see above)")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--steps", type=int, default=4, help="of each model in a round")
    parser.add_argument("--built-units", type=int, default=100, help="of the model constructed")
    parser.add_argument("--size", choices=SIZES, default="6m", help="model whose bytes count")
    parser.add_argument("--measure", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure is not None:
        kind, *rest = args.measure
        print_json(measure_bytes(args, *rest) if kind == "bytes" else measure_host(args))
        return
    host = _in_own_process([*sys.argv, "--measure", "host"], _KEEP_FREED)
    cells = {
        (engine, ranks): {
            "host_us": host[engine][str(ranks)],
            **_built(engine, ranks, args),
            **_in_own_process([*sys.argv, "--measure", "bytes", engine, str(ranks)]),
        }
        for engine in args.engines
        for ranks in args.ranks
    }
    _show(args, cells, host)
    print_json(
        {
            "benchmark": "scale",
            "config": {key: value for key, value in vars(args).items() if key != "measure"},
            "environment": environment(),
            "growth_of_host_time": {name: host[name]["growth"] for name in args.engines},
            "engines": {
                engine: {str(ranks): cells[engine, ranks] for ranks in args.ranks}
                for engine in args.engines
            },
        }
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
    model = nn.Sequential(*(Unit(args.width) for _ in range(args.units)))
    if group is not None:
        model = _WRAP[engine](model, group)
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

    def prepare() -> Callable[[], None]:
        step = _bytes_step(engine, *SIZES[args.size])
        step()  # compares ranks, for one
        stub_collectives(pair)
        return step

    held = resting_and_peak_bytes(prepare)
    return {"resting_mb": held.resting / 1e6, "peak_mb": held.peak / 1e6}


def _bytes_step(engine: str, width: int, layers: int) -> Callable[[], None]:
    torch.manual_seed(0)
    model = ENGINES[engine](Transformer(width, layers, 8, 128), TransformerBlock)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(torch.zeros(1, 65, dtype=torch.long)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _join(ranks: int) -> None:
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(1)
    # No gather fills a buffer here: whatever lies in it must not slow down what computes with it.
    torch.set_flush_denormal(True)
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())


def _layerzero(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    from layerzero import ZeRO3

    return ZeRO3(model, group, auto_wrap_policy={Unit})


def _fully_shard(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh.from_group(group, "cpu")
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    return model


_WRAP: dict[str, Callable[[nn.Module, dist.ProcessGroup], nn.Module]] = {
    "layerzero": _layerzero,
    "fully_shard": _fully_shard,
}


def _built(engine: str, ranks: int, args: argparse.Namespace) -> dict[str, float]:
    command = [str(HERE / "bench_construction.py"), "--units", str(args.built_units)]
    found = _in_own_process([*command, "--measure", engine, str(ranks)])
    return {
        "cpu_seconds": found["cpu_seconds"],
        "peak_mb_of_construction": found["peak_mb"],
    }


def _in_own_process(command: list[str], changed: Mapping[str, str] | None = None) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **(changed or {})},
    )
    if done.returncode != 0:
        sys.exit(f"{' '.join(command[1:])}: exit code {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


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
