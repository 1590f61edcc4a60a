"""What does it cost to wrap a model, and does the cost grow with the number of ranks?

Wraps a model of many small units under torch's fake process group, as rank 0 of `--ranks` ranks.
Every construction runs in its own process, which has wrapped a model of two units before, so that
imports and one-time caches do not count. Memory is the peak resident size while wrapping minus that
just before, so the model itself does not count.

Model parallelism and files are not covered; agreement between ranks costs what the fake collectives
cost.
"""

from __future__ import annotations

import argparse
import gc
import re
import time
from pathlib import Path
from typing import Any

import torch
from common import (
    Spread,
    in_own_process,
    interleave,
    join_fake_world,
    options,
    print_json,
    print_result,
    print_table,
    ratio,
    spreads,
)
from engines import ENGINES
from torch import Tensor, nn

COMPARED = ("layerzero", "fully_shard")
MB = 1 << 20


def main() -> None:
    parser = options(__doc__, COMPARED, units=400, width=64, rounds=3)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 4096])
    parser.add_argument("--frozen", action="store_true", help="one parameter of each unit is")
    parser.add_argument("--measure", nargs=2, metavar=("ENGINE", "RANKS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure is not None:
        engine, ranks = args.measure
        print_json(measure(engine, int(ranks), args))
        return
    results = {ranks: _compare(ranks, args) for ranks in args.ranks}
    for ranks, result in results.items():
        _show(ranks, args.units, result)
    print_result(args, ranks=results)


def measure(engine: str, ranks: int, args: argparse.Namespace) -> dict[str, float]:
    """Wrap one model in this process, as rank 0 of `ranks` ranks."""
    join_fake_world(ranks)
    wrap = ENGINES[engine]
    first = wrap(_model(2, args), Unit)
    model = _model(args.units, args)
    gc.collect()
    before = _resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # Resets the peak (VmHWM); see proc(5).
    start, start_cpu = time.perf_counter(), time.process_time()
    model = wrap(model, Unit)
    result = {
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - start_cpu,
        "peak_mb": (_resident_bytes("VmHWM") - before) / MB,
    }
    gc.collect()
    result["kept_mb"] = (_resident_bytes("VmRSS") - before) / MB
    del first, model
    return result


class Unit(nn.Module):
    """Nine parameters of different sizes, like a decoder layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.gate = nn.Linear(width, 2 * width, bias=False)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError("it is wrapped, and never run")


def _model(units: int, args: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(Unit(args.width) for _ in range(units)))
    if args.frozen:
        for unit in model:
            unit.proj.weight.requires_grad_(False)
    return model


def _resident_bytes(field: str) -> int:
    """Resident bytes of this process: `VmRSS` now, `VmHWM` at the peak."""
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.M)
    if found is None:
        raise NotImplementedError("this benchmark reads /proc/self/status of Linux")
    return int(found[1]) * 1024


def _compare(ranks: int, args: argparse.Namespace) -> dict[str, Any]:
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in args.engines}

    def once(name: str) -> float:
        measured[name].append(in_own_process(name, str(ranks)))
        return measured[name][-1]["cpu_seconds"]

    times = interleave(args.engines, once, args.rounds, warmup=0)
    result: dict[str, Any] = {
        name: spreads({key: [each[key] for each in of] for key in of[0]})
        for name, of in measured.items()
    }
    if set(COMPARED) <= set(args.engines):
        result["layerzero_over_fully_shard"] = ratio(*(times[name] for name in COMPARED)).as_dict()
    return result


def _show(ranks: int, units: int, result: dict[str, Any]) -> None:
    print(f"{ranks} ranks, {units} units: medians (quartiles)")
    versus = result.get("layerzero_over_fully_shard")
    rows = []
    for name in COMPARED:
        if name in result:
            digits = {"cpu_seconds": 2, "seconds": 2, "peak_mb": 0, "kept_mb": 0}
            cells = [Spread(**result[name][key]).text(number) for key, number in digits.items()]
            over = Spread(**versus).text() if versus and name == "layerzero" else ""
            rows.append([name, *cells, over])
    header = ["engine", "CPU s", "wall s", "peak MB", "kept MB", "CPU / fully_shard"]
    print_table(header, rows)
    print()


if __name__ == "__main__":
    main()
