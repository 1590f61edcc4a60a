"""How long is a training step, and how much memory does it take, under each engine?

A transformer on gloo ranks of this machine, AdamW included. Every engine trains the same model on
the same data with its defaults; the bare model trains without communication. The engines take turns
in each round, so a ratio is within one round; the slowest rank counts. gloo's threads are scheduled
as each engine's users have them (`let_gloo_wait`). Peak bytes come from a separate untimed run
(memory.py explains how they are counted). DeepSpeed takes part where it is installed (peers.py).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from common import (
    SIZES,
    Spread,
    difference,
    let_gloo_wait,
    options,
    print_result,
    print_table,
    ratio,
    run_on_ranks,
    spreads,
    take_turns,
)
from engines import (
    ENGINES,
    LEARNING_RATE,
    TransformerBlock,
    make_transformer,
    random_batches,
    training,
)
from memory import peak_bytes, self_check
from peers import PEERS, deepspeed, installed_peers
from torch import Tensor


def main() -> None:
    defaults = {"size": "25m", "batch": 2, "length": 128, "rounds": 7, "steps": 2}
    parser = options(__doc__, (*ENGINES, *installed_peers()), **defaults)
    parser.set_defaults(engines=[e for e in parser.get_default("engines") if e != "rows"])
    parser.add_argument("--precision", choices=("bf16", "float32"), default="bf16")
    parser.add_argument("--world-size", type=int, nargs="+", default=[2], help="one or several")
    measured = parser.add_mutually_exclusive_group()
    measured.add_argument("--no-peak", action="store_true", help="measure the time only")
    measured.add_argument("--peak-only", action="store_true", help="measure no time")
    args = parser.parse_args()
    self_check()
    results = {}
    for world_size in args.world_size:
        results[world_size] = _measured(args, world_size)
        where = f"{args.precision}, {world_size} ranks, {args.batch} x {args.length}"
        _show(results[world_size], args.engines, where)
    print_result(args, world_sizes=results)


def _measured(args: argparse.Namespace, world_size: int) -> dict[str, Any]:
    times: dict[str, list[float]] = {}
    losses: dict[str, list[float]] = {}
    if not args.peak_only:
        times, losses = run_on_ranks(world_size, measure_time, args)[0]
    peaks = {}
    for name in () if args.no_peak else args.engines:
        peaks[name] = max(run_on_ranks(world_size, measure_peak, args, name))
    return _summary(args, times, losses, peaks)


def measure_time(args: argparse.Namespace) -> tuple[dict[str, list[float]], Any]:
    """Run on each rank: step times of every engine (slowest rank), and its losses."""
    losses: dict[str, list[float]] = {name: [] for name in args.engines}

    def noting(name: str) -> Callable[[], None]:
        step = make_step(name, args)
        return lambda: losses[name].append(step().item())

    steps = {name: noting(name) for name in args.engines}
    times = take_turns(
        steps, args.rounds, args.steps, before=lambda name: let_gloo_wait(name == "layerzero")
    )
    return times, losses


def measure_peak(args: argparse.Namespace, name: str) -> int:
    """Run on each rank: peak bytes of one engine."""
    # A first step at the smallest size, so that imports of the engine and workspaces of the math
    # library do not count.
    make_step(name, args, "tiny")()
    return peak_bytes(lambda: make_step(name, args))


def make_step(name: str, args: argparse.Namespace, size: str | None = None) -> Callable[[], Tensor]:
    """One training step of an engine, each on its rank's next batch; returns the loss."""
    model = make_transformer(SIZES[size or args.size], args.length)
    next_batch = random_batches(args.batch, args.length)
    if name in PEERS:
        step = deepspeed(model, LEARNING_RATE, args.batch)
        return lambda: step(next_batch())
    return training(ENGINES[name](model, TransformerBlock, args.precision == "bf16"), next_batch)


def _summary(
    args: argparse.Namespace,
    times: dict[str, list[float]],
    losses: dict[str, list[float]],
    peaks: dict[str, int],
) -> dict[str, Any]:
    over_bare = {
        name: difference(values, times["bare"])
        for name, values in times.items()
        if name != "bare" and "bare" in times
    }
    model = make_transformer(SIZES[args.size], args.length)
    result: dict[str, Any] = {
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "step_ms": spreads(times),
        "over_bare_ms": spreads(over_bare),
        "peak_bytes": peaks,
    }
    engines = [name for name in losses if name not in ("bare", "ddp")]
    result["losses_equal"] = {
        name: each == losses[engines[0]]
        for name, each in losses.items()
        if engines and name != "bare"
    }
    for other in ("ddp", "fully_shard", "fsdp1", *PEERS):
        for what, found in (("over_bare", over_bare), ("step", times)):
            if {"layerzero", other} <= found.keys() and (what, other) != ("over_bare", "ddp"):
                spread = ratio(found["layerzero"], found[other])
                result[f"{what}_vs_{other}"] = spread.as_dict()
        if {"layerzero", other} <= peaks.keys():
            result[f"peak_vs_{other}"] = round(peaks["layerzero"] / peaks[other], 4)
    return result


def _show(result: dict[str, Any], names: list[str], where: str) -> None:
    title = f"{result['num_parameters'] / 1e6:.1f} M parameters, {where}"
    peaks = {name: f"{peak / 1e6:.1f}" for name, peak in result["peak_bytes"].items()}
    if result["step_ms"]:
        print(f"{title}; ms a step, median (quartiles)")
        rows = []
        for name in names:
            over = result["over_bare_ms"].get(name)
            step = Spread(**result["step_ms"][name]).text(0)
            rows.append([name, step, Spread(**over).text(0) if over else "", peaks.get(name, "")])
        print_table(["engine", "step", "over bare", "peak MB"], rows)
    else:
        print(f"{title}; peak of the fullest rank")
        print_table(["engine", "peak MB"], [[name, peaks[name]] for name in names])
    for key, value in result.items():
        if "_vs_" in key:
            print(f"{key}: {Spread(**value).text() if isinstance(value, dict) else value}")
    print()


if __name__ == "__main__":
    main()
