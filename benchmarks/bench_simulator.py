"""Does the simulator predict the step of each mode of layered ZeRO, before it has run?

On gloo ranks of this machine, for a transformer trained with AdamW:

    calibrate  what a message costs between all ranks (message_costs.py), and the program of a
               step: every rank runs the engine in each mode on a fake group, all of them at once,
               and records what its threads do and their core seconds, while gloo carries its
               messages to itself (dry_run.py)
    predict    simulate the programs on the cores of this machine (simulator.py)
    measure    only then train, the modes taking turns in each round; the slowest rank counts

No figure is fitted to a measured step; but of several ways to measure what a message costs, the
one here was chosen because core seconds of steps on a busy machine agreed best. "cores" are core
milliseconds of a rank in a step, which other work on the machine changes less (by a third at most,
as far as seen); if these agree and milliseconds do not, the machine was busy. Freed memory is kept
by malloc, in all three parts: else steps take up to thousands of fresh pages, by where buffers lie.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist
from bench_step import SIZES
from common import (
    Spread,
    environment,
    interleave,
    keep_freed_memory,
    max_over_ranks,
    print_json,
    print_table,
    run_on_ranks,
)
from dry_run import Loopback, Recorder
from layered_ranks import Config, Engine, Trainer, shard_with_layerzero
from message_costs import measure_costs
from simulator import Link, Machines, MessageCosts, Program, simulate

BAR = 0.15


class Mode(NamedTuple):
    arguments: dict[str, Any]
    """Of `ZeRO3`."""
    micro_batches: int = 1


def modes_of(world_size: int) -> dict[str, Mode]:
    """The modes of docs/reference/layered.md on so many ranks; "/2" has zero3_size=2."""
    half = world_size // 2
    modes = {
        f"{outer}/{size}": Mode({"outer": outer, "zero3_size": size})
        for size in sorted({1, half})
        for outer in ("zero1", "replicate")
    }

    def layered(name: str, micro_batches: int = 1, **arguments: Any) -> None:
        modes[f"zero1/{half} {name}"] = Mode({"zero3_size": half, **arguments}, micro_batches)

    def reduced(name: str, micro_batches: int = 1, **policy: Any) -> None:
        layered(name, micro_batches, reduction=policy)

    reduced("deterministic", deterministic=True)
    layered("kept", reshard_after_forward=False)
    reduced("separate_groups", separate_groups=True)
    reduced("in_flight", in_flight="512MB")
    reduced("2 x unsharded", micro_batches=2, accumulation="unsharded")
    reduced("2 x sharded", micro_batches=2, accumulation="sharded")
    modes["shard"] = Mode({"outer": "shard", "zero3_size": half})
    kept = {"outer": "shard", "zero3_size": half, "reshard_after_forward": "compute_shard"}
    modes["shard compute_shard"] = Mode(kept)
    return modes


def main() -> None:
    args = _parse()
    width, layers = SIZES[args.size]
    config = Config(width, layers, args.batch, args.length, args.rounds, 1, 1, "auto")
    load = os.getloadavg()[0]
    print(f"{load:.1f} processes share {os.cpu_count()} cores before the first rank starts\n")
    keep_freed_memory()
    results = {}
    for world_size in args.world_sizes:
        predicted, costs, link = predict(world_size, config, not args.no_loopback)
        measured = run_on_ranks(world_size, measure, config)
        results[world_size] = result = _beside(predicted, measured)
        _show(result, world_size, costs, link)
        result["links"] = {**asdict(costs), **asdict(link)}
    print_json(
        {
            "benchmark": "simulator",
            "world_sizes": results,
            "load_before": load,
            "config": vars(args),
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
    parser.add_argument("--rounds", type=int, default=9, help="of recording, and of measuring")
    parser.add_argument(
        "--no-loopback",
        action="store_true",
        help="record compute alone, not beside the copies of messages: what these make it slower",
    )
    return parser.parse_args()


# Predicted ------------------------------------------------------------------------------------


def predict(
    world_size: int, config: Config, loopback: bool = True
) -> tuple[dict[str, dict[str, float]], MessageCosts, Link]:
    """Milliseconds of a step in each mode, and core milliseconds of a rank."""
    costs, link = run_on_ranks(world_size, measure_costs, config.rounds)[0]
    ranks = run_on_ranks(world_size, record, config, loopback, backend="fake")
    machine = Machines(world_size, os.cpu_count() or 1, inside=link, between=link)
    predicted = {}
    for name in modes_of(world_size):
        # Each recorded step with those of the other ranks: they wait for the one that is late.
        steps = zip(*(programs[name] for programs in ranks), strict=True)
        results = [simulate(dict(enumerate(step)), machine, costs) for step in steps]
        predicted[name] = {
            "ms": statistics.median(result.step_s for result in results) * 1e3,
            "core_ms": statistics.median(r.core_s for r in results) / world_size * 1e3,
        }
    return predicted, costs, link


def record(config: Config, loopback: bool) -> dict[str, list[Program]]:
    """Run on each rank of a fake group: programs of some steps in each mode."""
    recorder = Recorder()
    steps: dict[str, list[Program]] = {}
    with recorder.attached(Loopback() if loopback else None):
        trainers = _trainers(config)
        for index in range(WARMUP + config.rounds):
            for name, trainer in trainers.items():
                gc.collect()
                step = recorder.step(trainer.step)
                if index >= WARMUP:
                    steps.setdefault(name, []).append(step)
    return steps


WARMUP = 2
"""Steps: the first records the order of units, and the optimizer makes its state."""


# Measured -------------------------------------------------------------------------------------


def measure(config: Config) -> dict[str, dict[str, list[float]]]:
    """Run on each gloo rank: milliseconds of steps, and this rank's core milliseconds."""
    trainers = _trainers(config)
    core_ms: dict[str, list[float]] = {name: [] for name in trainers}

    def step_ms(name: str) -> float:
        gc.collect()
        dist.barrier()
        start, cores = time.perf_counter(), time.process_time()
        trainers[name].step()
        end = time.perf_counter()
        core_ms[name].append((time.process_time() - cores) * 1e3)
        return max_over_ranks(end - start) * 1e3

    ms = interleave(list(trainers), step_ms, config.rounds, WARMUP)
    return {name: {"ms": ms[name], "core_ms": core_ms[name][WARMUP:]} for name in trainers}


def _trainers(config: Config) -> dict[str, Trainer]:
    return {
        name: Trainer(_engine(mode), replace(config, micro_batches=mode.micro_batches))
        for name, mode in modes_of(dist.get_world_size()).items()
    }


def _engine(mode: Mode) -> Engine:
    from layerzero import ReductionPolicy

    arguments = dict(mode.arguments)
    if "reduction" in arguments:
        arguments["reduction"] = ReductionPolicy(**arguments["reduction"])
    return Engine(partial(shard_with_layerzero, **arguments))


# Shown ----------------------------------------------------------------------------------------


def _beside(
    predicted: Mapping[str, Mapping[str, float]], ranks: list[dict[str, dict[str, list[float]]]]
) -> dict[str, Any]:
    rows = {}
    for name, values in predicted.items():
        ms = Spread.of(ranks[0][name]["ms"])
        cores = [Spread.of(rank[name]["core_ms"]).median for rank in ranks]
        core_ms = sum(cores) / len(cores)
        rows[name] = {
            "predicted": values,
            "measured_ms": ms.as_dict(),
            "measured_core_ms": core_ms,
            "ratio": ms.median / values["ms"],
            "core_ratio": core_ms / values["core_ms"],
        }
    return {"modes": rows}


def _show(result: dict[str, Any], world_size: int, costs: MessageCosts, link: Link) -> None:
    rows = result["modes"]
    within = sum(abs(row["ratio"] - 1) <= BAR for row in rows.values())
    print(f"{world_size} ranks: {within} of {len(rows)} modes within {BAR:.0%}")
    print(
        f"a message: {costs.post_s * 1e6:.0f} us to post and wait, {costs.send_s * 1e6:.0f} us "
        f"and {costs.send_s_per_byte * 1e9:.2f} ns a byte at each end; "
        f"latency {link.latency_s * 1e6:.0f} us"
    )
    print_table(
        ["mode", "predicted ms", "measured ms", "ratio", "predicted cores", "measured", "ratio"],
        [
            [
                name,
                f"{row['predicted']['ms']:.0f}",
                Spread(**row["measured_ms"]).text(0),
                f"{row['ratio']:.2f}",
                f"{row['predicted']['core_ms']:.0f}",
                f"{row['measured_core_ms']:.0f}",
                f"{row['core_ratio']:.2f}",
            ]
            for name, row in rows.items()
        ],
    )
    print()


if __name__ == "__main__":
    main()
