"""What is it worth that gloo's threads take no core from those that compute?

See the note in layerzero/comm/gloo/threads.py. A transformer on gloo ranks of this machine,
AdamW included, under DDP, layerzero and `fully_shard`; they share one process group, so they share
its threads. Each runs in each round with threads that take a core when they wake (Linux's default:
"takes") and with those that wait for one ("waits"). Ratios are within one round; elapsed time is
that of the slowest rank, processor time the mean of ranks.
"""

from __future__ import annotations

import argparse
import gc
import time
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from bench_step import SIZES, Config, make_step
from common import (
    Interval,
    Spread,
    environment,
    interleave,
    keep_freed_memory,
    let_gloo_wait,
    max_over_ranks,
    print_json,
    print_table,
    run_on_ranks,
)

ENGINES = ("ddp", "layerzero", "fully_shard")
KINDS = tuple((engine, waits) for engine in ENGINES for waits in (False, True))
CLOCKS = ("elapsed", "computing thread", "other threads")
WARMUP_ROUNDS = 2

Times = dict[str, list[list[float]]]
"""By clock: of each kind, milliseconds of a step in each round."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="6m")
    parser.add_argument("--batch", type=int, default=1, help="sequences a rank")
    parser.add_argument("--length", type=int, default=64, help="bytes in a sequence")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=2, help="of each kind in a round")
    args = parser.parse_args()
    keep_freed_memory()
    times = run_on_ranks(args.world_size, measure, args)[0]
    report(args, times)


def measure(args: argparse.Namespace) -> Times:
    """Run on each rank."""
    width, layers = SIZES[args.size]
    config = Config(width, layers, 8, args.batch, args.length, args.rounds, args.steps)
    with mock.patch("layerzero.step.operations.wake_without_preempting"):
        steps = {engine: make_step(engine, config) for engine in ENGINES}
    threads: Times = {clock: [[] for _ in KINDS] for clock in CLOCKS[1:]}

    def step_ms(name: str) -> float:
        engine, waits = KINDS[int(name)]
        let_gloo_wait(waits)
        gc.collect()
        dist.barrier()
        start = [clock() for clock in _CLOCKS]
        for _ in range(args.steps):
            steps[engine]()
        elapsed, process, thread = (
            (clock() - before) * 1e3 / args.steps
            for clock, before in zip(_CLOCKS, start, strict=True)
        )
        of_all = torch.tensor([thread, process - thread], dtype=torch.float64)
        dist.all_reduce(of_all)
        means = (of_all / dist.get_world_size()).tolist()
        for clock, value in zip(CLOCKS[1:], means, strict=True):
            threads[clock][int(name)].append(value)
        return max_over_ranks(elapsed)

    gc.freeze()
    names = [str(place) for place in range(len(KINDS))]
    elapsed = interleave(names, step_ms, args.rounds, WARMUP_ROUNDS)
    counted = {
        clock: [values[WARMUP_ROUNDS:] for values in of_kinds]
        for clock, of_kinds in threads.items()
    }
    return {CLOCKS[0]: [elapsed[name] for name in names], **counted}


_CLOCKS = (time.perf_counter, time.process_time, time.thread_time)


def report(args: argparse.Namespace, times: Times) -> None:
    names = [f"{engine}, {'waits' if waits else 'takes'}" for engine, waits in KINDS]
    of_ddp = {
        name: Interval.of(_ratios(values, times[CLOCKS[0]][0]))
        for name, values in zip(names, times[CLOCKS[0]], strict=True)
    }
    of_takes = {
        engine: Interval.of(_ratios(times[CLOCKS[0]][place + 1], times[CLOCKS[0]][place]))
        for place, engine in zip(range(0, len(KINDS), 2), ENGINES, strict=True)
    }
    print(f"{args.size}, {args.world_size} ranks, {args.batch} x {args.length}; ms a step")
    rows = [
        [
            name,
            *(Spread.of(times[clock][place]).text(0) for clock in CLOCKS),
            of_ddp[name].text(),
            of_takes[engine].text() if waits else "",
        ]
        for place, (name, (engine, waits)) in enumerate(zip(names, KINDS, strict=True))
    ]
    print_table(["", *CLOCKS, "of ddp's that takes", "waits of takes"], rows)
    result: dict[str, Any] = {
        "benchmark": "loop_threads",
        "config": vars(args),
        "environment": environment(),
        "step_ms": {
            clock: {
                name: Spread.of(values).as_dict()
                for name, values in zip(names, times[clock], strict=True)
            }
            for clock in CLOCKS
        },
        "of_ddp": {name: found._asdict() for name, found in of_ddp.items()},
        "waits_of_takes": {engine: found._asdict() for engine, found in of_takes.items()},
    }
    print_json(result)


def _ratios(numerators: list[float], denominators: list[float]) -> list[float]:
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


if __name__ == "__main__":
    main()
