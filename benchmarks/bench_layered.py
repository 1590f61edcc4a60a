"""What does layered ZeRO save? Step time, bytes sent and bytes resident, measured and predicted.

Measured: gloo ranks of this machine, in two shard groups ("nodes") of neighbours, train one
transformer with AdamW on the same data under each engine: every mode of layerzero, `fully_shard`
over all ranks and over a 2-D mesh (HSDP). The engines take turns in each round, so a ratio is
within one round; the slowest rank counts. "zero1/2" has zero3_size=2; "shard" is one hop over all.

Predicted: the step of a large model on up to 4096 ranks, by the alpha-beta model of alpha_beta.py
with the figures from the flags, as a table and a plot.

Both, side by side: predictions for the measured model with this machine's links and compute,
measured in the same run with all ranks busy; nothing is fitted to the step times. Close agreement
is not expected: the "links" of one machine are its cores, which also compute, copy and sum, so a
byte that "overlaps" still takes time from compute. The table therefore has two predictions, with
perfect overlap and with none. In addition, links are measured without compute and compute without
communication, and neither includes sums, copies and waits for the slowest rank. With more
processes than cores, alpha is mostly the latency of the scheduler.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict
from typing import Any

import scaling
from alpha_beta import Link, Links, Split, Workload, predict, resident_nbytes
from bench_step import SIZES
from common import Spread, environment, print_json, print_table, ratio, run_on_ranks
from layered_ranks import Config, engines_of, measure


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
        if config.micro_batches == 1:
            result["prediction"] = predict_measured(result, world_size)
            _show_beside(result, world_size)
    predictions = scaling.predict_all(args)
    scaling.show(predictions)
    if args.plot:
        scaling.plot(predictions, args)
    print_json(
        {
            "benchmark": "layered",
            "measured": measured,
            "predicted": predictions,
            "load_before": load,
            "config": vars(args) | asdict(config),
            "environment": environment(),
        }
    )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    measuring = parser.add_argument_group("measured")
    measuring.add_argument("--world-sizes", type=int, nargs="+", choices=(2, 4), default=[2, 4])
    measuring.add_argument("--size", choices=SIZES, default="6m")
    measuring.add_argument("--batch", type=int, default=1, help="sequences a rank")
    measuring.add_argument("--length", type=int, default=64, help="bytes in a sequence")
    measuring.add_argument("--rounds", type=int, default=7)
    measuring.add_argument("--steps", type=int, default=1, help="of each engine in a round")
    measuring.add_argument("--micro-batches", type=int, default=1, help="more: nothing predicted")
    measuring.add_argument(
        "--accumulation",
        choices=("auto", "unsharded", "sharded"),
        default="auto",
        help="where micro-batches of layerzero add up",
    )
    scaling.add_flags(parser)
    args = parser.parse_args()
    scaling.check_flags(parser, args)
    if args.micro_batches < 1:
        parser.error("--micro-batches: expected at least 1")
    return args


# Predicted ------------------------------------------------------------------------------------


def predict_measured(result: dict[str, Any], world_size: int) -> dict[str, dict[str, Any]]:
    """For each engine that can be predicted: its prediction for this machine, and the ratios."""
    links = {name: Link(**link) for name, link in result["links"].items()}
    inner, outer = links.get("inner", links["outer"]), links["outer"]
    work = Workload(**result["workload"])
    rows = {}
    for name, engine in engines_of(world_size, "auto").items():
        if engine.mode is None:
            continue
        split = Split(engine.zero3_size, world_size // engine.zero3_size)
        prediction = predict(engine.mode, work, split, Links(inner, outer, outer))
        nbytes = work.gathered_nbytes
        resident = resident_nbytes(engine.mode, split, nbytes, nbytes, casts=False)
        step_ms = result["step_ms"][name]["median"]
        rows[name] = {
            **asdict(prediction),
            "step_ratio": step_ms / 1e3 / prediction.step_s,
            "serial_ratio": step_ms / 1e3 / prediction.serial_s,
            "sent_ratio": _total(result["sent"][name]) / _total(prediction.sent_nbytes),
            "resident_ratio": _total(result["resident"][name]) / resident,
        }
    return rows


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
        "links": first["links"],
        "workload": first["workload"],
    }


def _against(times: dict[str, list[float]], other: str) -> dict[str, dict[str, float]]:
    return {name: ratio(values, times[other]).as_dict() for name, values in times.items()}


def _show_measured(result: dict[str, Any], world_size: int) -> None:
    nbytes = result["workload"]["gathered_nbytes"]
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


def _show_beside(result: dict[str, Any], world_size: int) -> None:
    print(f"Measured / predicted, {world_size} ranks")
    for name, link in result["links"].items():
        alpha, bandwidth = link["alpha_s"] * 1e6, link["bandwidth"] / 1e9
        print(f"link {name}: alpha {alpha:.0f} us, {bandwidth:.2f} GB/s")
    work = result["workload"]
    parts = ("forward", "backward", "optimizer")
    print("bare, ms:", ", ".join(f"{part} {work[f'{part}_s'] * 1e3:.0f}" for part in parts))
    print_table(
        ["engine", "ms", "predicted", "ratio", "no overlap", "ratio", "sent ratio", "stays ratio"],
        [
            [
                name,
                f"{result['step_ms'][name]['median']:.0f}",
                f"{row['step_s'] * 1e3:.0f}",
                f"{row['step_ratio']:.2f}",
                f"{row['serial_s'] * 1e3:.0f}",
                f"{row['serial_ratio']:.2f}",
                f"{row['sent_ratio']:.3f}",
                f"{row['resident_ratio']:.3f}",
            ]
            for name, row in result["prediction"].items()
        ],
    )
    print()


def _total(parts: dict[str, float]) -> float:
    return sum(parts.values())


def _mb(nbytes: float) -> str:
    return f"{nbytes / 1e6:.1f}"


if __name__ == "__main__":
    main()
