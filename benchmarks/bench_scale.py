"""What does an engine cost without its bytes: host time, construction, memory, by number of ranks?

Rank 0 of torch's fake process group, which moves no bytes. A fake all-gather copies the input once
for each rank, and a fake reduce-scatter splits its input into one view for each, which at 512 ranks
takes as long as an engine's own work. So every fake collective runs in a group of two ranks, on 64
elements, for each engine alike; the buffers around it keep their sizes. What still grows with the
number of ranks is an engine's own.

Host time: forward, backward and `zero_grad` of a model with units so small that their compute costs
nearly nothing, in process time, over the bare model's. Models for all numbers of ranks live in one
process, in subgroups of the largest world, and take turns in each round, so a ratio is within one
round. Two things that are no work of an engine would show in it, and do not:
- Padding. A unit of 63 columns has 16,128 elements, 16,384 when padded for 4096 ranks: buffers
  are of almost the same size in all worlds. With 16 columns these were 1,088 and 16,384.
- Page faults. The C library may return a freed buffer to the system and have a fault for each 4 KB
  of the next one, or may not, by what lies beside it: 0 to 70 faults a unit and step in one and the
  same program. Here it keeps what is freed.

Construction and bytes: a process of its own for each, because both depend on what was there before.
Construction is of a model of many units, after one of two units, so that imports and one-time
caches do not count; its memory is the peak resident size while wrapping minus that just before.
Bytes are those of bench_step.py's model and AdamW (memory.py), with one sequence of 64 tokens.
"""

from __future__ import annotations

import argparse
import gc
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
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
from engines import ENGINES, TransformerBlock, make_transformer, training
from memory import resting_and_peak_bytes
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

PARTS = ("host", "construction", "bytes")
VERBS = ("all_gather_single", "_allgather_base", "reduce_scatter_single", "_reduce_scatter_base")
# glibc's: no freed block below 32 MB (its largest limit), and no 1 GB, goes back to the system.
_KEEP_FREED = {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**30)}
_MB = 1 << 20


def main() -> None:
    engines = ("layerzero", "fully_shard", "fsdp1", "rows")
    parser = options(__doc__, engines, width=63, units=24, rounds=11, steps=4, size="6m")
    parser.set_defaults(engines=[*engines[:2]])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512, 4096])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure")
    parser.add_argument("--built-units", type=int, default=100, help="of the model constructed")
    parser.add_argument("--measure", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure is not None:
        kind, *rest = args.measure
        measure: dict[str, Callable[..., Any]] = {
            "host": measure_host,
            "construction": measure_construction,
        }
        print_json(measure.get(kind, measure_bytes)(args, *rest))
        return
    host = {}
    if "host" in args.parts:
        host = in_own_process("host", variables=_KEEP_FREED)
    cells: dict[str, dict[str, Any]] = {}
    for engine in args.engines:
        for ranks in map(str, args.ranks):
            cell = cells[f"{engine} {ranks}"] = dict(host.get(engine, {}).get(ranks, {}))
            for part in [part for part in PARTS[1:] if part in args.parts]:
                cell |= in_own_process(part, engine, ranks)
    _show(cells)
    growth = {engine: host[engine]["growth"] for engine in args.engines if host}
    for engine, spread in growth.items():
        text = Spread(**spread).text()
        print(f"{engine}: host time at {args.ranks[-1]} ranks over that at {args.ranks[0]}: {text}")
    print_result(args, growth_of_host_time=growth, engines=cells)


def measure_host(args: argparse.Namespace) -> dict[str, Any]:
    """Microseconds of a unit and step over the bare model, by engine and number of ranks."""
    _join(max(args.ranks))
    groups = {ranks: dist.new_group(list(range(ranks))) for ranks in args.ranks}
    pair = dist.new_group([0, 1])
    steps = {
        f"{engine} {ranks}": make_step(engine, args.units, args.width, groups[ranks])
        for engine in args.engines
        for ranks in args.ranks
    }
    steps["bare"] = make_step("bare", args.units, args.width)
    for step in steps.values():
        step()  # Compares ranks, for one.
    stub_collectives(pair)

    def step_us(name: str) -> float:
        gc.collect()
        start = time.process_time()
        for _ in range(args.steps):
            steps[name]()
        return (time.process_time() - start) / args.steps / args.units * 1e6

    times = interleave([*steps], step_us, args.rounds, warmup=2)
    over = {name: difference(values, times["bare"]) for name, values in times.items()}
    found: dict[str, Any] = {}
    for engine in args.engines:
        growth = ratio(*(over[f"{engine} {args.ranks[i]}"] for i in (-1, 0)))
        found[engine] = {"growth": growth.as_dict()}
        for ranks in args.ranks:
            own, other = over[f"{engine} {ranks}"], over.get(f"fully_shard {ranks}")
            cell = found[engine][str(ranks)] = {"host_us": Spread.of(own).as_dict()}
            if other is not None:
                cell["host_of_fully_shard"] = ratio(own, other).as_dict()
    return found


def make_step(
    engine: str, units: int, width: int, group: dist.ProcessGroup | None = None
) -> Callable[[], None]:
    """Forward, backward and `zero_grad` of an engine's model of so many units; see `Unit`."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(Unit(width) for _ in range(units)))
    options: dict[str, Any] = {}
    if group is not None and engine == "fully_shard":
        options = {"mesh": DeviceMesh.from_group(group, "cpu")}
    elif group is not None:
        options = {"process_group": group}
    model = ENGINES[engine](model, Unit, **options)
    optimizer = torch.optim.SGD(model.parameters())
    batch = torch.randn(1, width)

    def step() -> None:
        model(batch).sum().backward()
        optimizer.zero_grad()

    return step


class Unit(nn.Module):
    """Eight parameters and almost no compute."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def stub_collectives(pair: dist.ProcessGroup) -> None:
    """Have every later fake collective run in this group of two ranks, on 64 elements."""
    one, both = torch.zeros(64), torch.zeros(128)
    for verb in VERBS:
        original = getattr(dist.ProcessGroup, verb, None)
        if original is None:
            continue
        given = (both, one) if "gather" in verb else (one, both)

        def call(
            group: Any, out: Any, own: Any, *rest: Any, original: Any = original, given: Any = given
        ) -> Any:
            return original(pair, *given, *rest)

        setattr(dist.ProcessGroup, verb, call)


def measure_construction(args: argparse.Namespace, engine: str, ranks: str) -> dict[str, float]:
    """Processor seconds and peak megabytes of wrapping a model of `args.built_units` blocks."""
    join_fake_world(int(ranks))

    def model(units: int) -> nn.Module:
        return nn.Sequential(*(TransformerBlock(64, 8, 128) for _ in range(units)))

    first, built = ENGINES[engine](model(2), TransformerBlock), model(args.built_units)
    gc.collect()
    before = _resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # Resets the peak (VmHWM); see proc(5).
    start = time.process_time()
    built = ENGINES[engine](built, TransformerBlock)
    seconds = time.process_time() - start
    peak = _resident_bytes("VmHWM") - before
    del first, built
    return {"construction_seconds": seconds, "construction_peak_mb": peak / _MB}


def _resident_bytes(field: str) -> int:
    """Resident bytes of this process: `VmRSS` now, `VmHWM` at the peak."""
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.M)
    if found is None:
        raise NotImplementedError("this benchmark reads /proc/self/status of Linux")
    return int(found[1]) * 1024


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


def _show(cells: dict[str, dict[str, Any]]) -> None:
    columns = {
        **{"host_us": "host us (quartiles)", "host_of_fully_shard": "/ fully_shard"},
        **{"construction_seconds": "construction CPU s", "construction_peak_mb": "its peak MB"},
        **{"resting_mb": "at rest MB", "peak_mb": "peak in a step MB"},
    }
    shown = [key for key in columns if any(key in cell for cell in cells.values())]
    rows = [
        [name, *(_text(cell.get(key), 0 if key == "host_us" else 2) for key in shown)]
        for name, cell in cells.items()
    ]
    print_table(["engine and ranks", *(columns[key] for key in shown)], rows)


def _text(value: Any, digits: int) -> str:
    if isinstance(value, dict):
        return Spread(**value).text(digits)
    return "" if value is None else f"{value:.{digits}f}"


if __name__ == "__main__":
    main()
