"""What is it worth that gloo's threads take no core from those that compute?

See the note in layerzero/comm/gloo/threads.py. A transformer on gloo ranks of this machine,
AdamW included, under DDP, layerzero and `fully_shard`; they share one process group, so they share
its threads. Each runs in each round with threads that take a core when they wake (Linux's default:
"takes") and with those that wait for one ("waits"). Ratios are within one round; elapsed time is
that of the slowest rank, processor time the mean of ranks.
"""

from __future__ import annotations

import argparse
from unittest import mock

import torch
from bench_step import make_step
from common import (
    Interval,
    Spread,
    difference,
    keep_freed_memory,
    let_gloo_wait,
    options,
    print_result,
    print_table,
    quotients,
    run_on_ranks,
    spreads,
    take_turns,
)

ENGINES = ("ddp", "layerzero", "fully_shard")
Times = dict[str, dict[str, list[float]]]
"""By clock and kind: milliseconds of a step in each round."""


def main() -> None:
    defaults = {"size": "6m", "batch": 1, "length": 64, "world_size": 2, "rounds": 20, "steps": 2}
    args = options(__doc__, **defaults).parse_args()
    args.precision = "float32"
    keep_freed_memory()
    times = run_on_ranks(args.world_size, measure, args)[0]
    elapsed = times["elapsed"]
    of_ddp = {n: Interval.of(quotients(v, elapsed["ddp, takes"])) for n, v in elapsed.items()}
    of_takes = {
        f"{engine}, waits": Interval.of(
            quotients(elapsed[f"{engine}, waits"], elapsed[f"{engine}, takes"])
        )
        for engine in ENGINES
    }
    print(f"{args.size}, {args.world_size} ranks, {args.batch} x {args.length}; ms a step")
    rows = [
        [
            name,
            *(Spread.of(of_kinds[name]).text(0) for of_kinds in times.values()),
            of_ddp[name].text(),
            of_takes[name].text() if name in of_takes else "",
        ]
        for name in elapsed
    ]
    print_table(["", *times, "of ddp's that takes", "waits of takes"], rows)
    print_result(
        args,
        step_ms={clock: spreads(of_kinds) for clock, of_kinds in times.items()},
        of_ddp={name: found._asdict() for name, found in of_ddp.items()},
        waits_of_takes={name: found._asdict() for name, found in of_takes.items()},
    )


def measure(args: argparse.Namespace) -> Times:
    """Run on each rank."""
    with mock.patch("layerzero.step.operations.wake_without_preempting"):
        steps = {engine: make_step(engine, args) for engine in ENGINES}
    kinds = {
        f"{engine}, {kind}": step for engine, step in steps.items() for kind in ("takes", "waits")
    }
    times = take_turns(
        kinds,
        args.rounds,
        args.steps,
        warmup=2,
        before=lambda kind: let_gloo_wait(kind.endswith("waits")),
    )

    def mean(values: list[float]) -> list[float]:
        return (torch.tensor(values) / args.world_size).tolist()

    own = {n: mean(difference(times.processor[n], times.others[n])) for n in kinds}
    others = {name: mean(values) for name, values in times.others.items()}
    return {"elapsed": times.elapsed, "computing thread": own, "other threads": others}


if __name__ == "__main__":
    main()
