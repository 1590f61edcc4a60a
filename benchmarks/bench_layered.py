"""What does layered ZeRO save? Step time, bytes sent and bytes resident.

gloo ranks of this machine, in two shard groups ("nodes") of neighbours, train one transformer with
AdamW on the same data under each engine: every mode of layerzero, `fully_shard` over all ranks and
over a 2-D mesh (HSDP). The engines take turns in each round, so a ratio is within one round; the
slowest rank counts. "zero1/2" has zero3_size=2; "shard" is one hop over all.

bench_simulator.py predicts these steps, bench_scaling.py those of up to 4096 ranks.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict
from typing import Any

from bench_step import SIZES
from common import Spread, environment, print_json, print_table, ratio, run_on_ranks
from layered_ranks import Config, measure


def main() -> None:
    args = _parse()
    width, layers = SIZES[args.size]
    config = Config(
        width=width,
        layers=layers,
        batch=args.batch,
        length=args.length,
        rounds=args.rounds,
        steps=args.steps,
        micro_batches=args.micro_batches,
        accumulation=args.accumulation,
    )
    load = os.getloadavg()[0]
    print(f"{load:.1f} processes share {os.cpu_count()} cores before the first rank starts\n")
    measured = {}
    for world_size in args.world_sizes:
        ranks = run_on_ranks(world_size, measure, config)
        measured[world_size] = result = _summary(ranks, world_size)
        _show_measured(result, world_size)
    print_json(
        {
            "benchmark": "layered",
            "measured": measured,
            "load_before": load,
            "config": vars(args) | asdict(config),
            "environment": environment(),
        }
    )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--world-sizes", type=int, nargs="+", choices=(2, 4), default=[2, 4])
    parser.add_argument("--size", choices=SIZES, default="6m")
    parser.add_argument("--batch", type=int, default=1, help="sequences a rank")
    parser.add_argument("--length", type=int, default=64, help="bytes in a sequence")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=1, help="of each engine in a round")
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument(
        "--accumulation",
        choices=("auto", "unsharded", "sharded"),
        default="auto",
        help="where micro-batches of layerzero add up",
    )
    args = parser.parse_args()
    if args.micro_batches < 1:
        parser.error("--micro-batches: expected at least 1")
    return args


# Shown ----------------------------------------------------------------------------------------


def _summary(ranks: list[dict[str, Any]], world_size: int) -> dict[str, Any]:
    """Combine the ranks' results: bytes of the rank with the most.

    Times are those of the slowest rank already.
    """
    first = ranks[0]
    times = first["times"]
    half = world_size // 2

    def most(key: str) -> dict[str, Any]:
        return {
            name: max((rank[key][name] for rank in ranks), key=lambda parts: sum(parts.values()))
            for name in times
        }

    deterministic = ratio(times[f"zero1/{half} deterministic"], times[f"zero1/{half}"])
    return {
        "step_ms": {name: Spread.of(values).as_dict() for name, values in times.items()},
        "step_vs_fully_shard": _against(times, "fully_shard"),
        "step_vs_hsdp": _against(times, "hsdp"),
        "deterministic_vs_zero1": deterministic.as_dict(),
        "sent": most("sent"),
        "resident": most("resident"),
        "last_loss": {name: values[-1] for name, values in first["losses"].items()},
        "parameter_nbytes": first["parameter_nbytes"],
    }


def _against(times: dict[str, list[float]], other: str) -> dict[str, dict[str, float]]:
    return {name: ratio(values, times[other]).as_dict() for name, values in times.items()}


def _show_measured(result: dict[str, Any], world_size: int) -> None:
    nbytes = result["parameter_nbytes"]
    print(f"Measured, {world_size} ranks, {_mb(nbytes)} MB of float32 parameters")
    print_table(
        ["engine", "ms a step", "vs fully_shard", "vs hsdp"],
        [
            [
                name,
                Spread(**step).text(0),
                Spread(**result["step_vs_fully_shard"][name]).text(),
                Spread(**result["step_vs_hsdp"][name]).text(),
            ]
            for name, step in result["step_ms"].items()
        ],
    )
    print(f"cost of deterministic: {Spread(**result['deterministic_vs_zero1']).text()}\n")
    kinds = ["parameters", "gradients", "optimizer", "compute shards"]
    print("MB a rank sends in a step, and MB that stay between steps")
    print_table(
        ["engine", "inner", "outer", "all", *kinds, "stays"],
        [
            [
                name,
                *(_mb(sent[axis]) for axis in ("inner", "outer", "all")),
                *(_mb(result["resident"][name][kind]) for kind in kinds),
                _mb(_total(result["resident"][name])),
            ]
            for name, sent in result["sent"].items()
        ],
    )
    print()


def _total(parts: dict[str, float]) -> float:
    return sum(parts.values())


def _mb(nbytes: float) -> str:
    return f"{nbytes / 1e6:.1f}"


if __name__ == "__main__":
    main()
