"""What do checked bytes cost? One model with verification "sampled", "always" and turned off.

A transformer on gloo ranks of this machine, AdamW included. The settings take turns in each round,
so a ratio is within one round; the slowest rank counts. A round of steps is a multiple of 8, of
which "sampled" checks one. Elapsed time, and processor time of a rank, which waits and other
processes disturb least.

It is one model that changes its setting, because two equal models differ by more than the checks
cost: by where their memory lies. "another" is such a model, without verification. For the same
reason malloc is told to keep freed memory.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from common import (
    Spread,
    environment,
    interleave,
    max_over_ranks,
    print_json,
    print_table,
    ratio,
    run_on_ranks,
)
from engines import Transformer, TransformerBlock

from layerzero import ZeRO3

SIZES = {"tiny": (64, 2), "6m": (256, 8), "25m": (512, 8)}  # width, layers
EVERY = {"off": sys.maxsize, "sampled": 8, "always": 1}
BARS = {"sampled": 1.01, "always": 1.05}
BASE = "off"
ANOTHER = "another"
WARMUP_ROUNDS = 1


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="25m")
    parser.add_argument("--batch", type=int, default=2, help="sequences a rank")
    parser.add_argument("--length", type=int, default=128, help="bytes in a sequence")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=8, help="of each in a round; a multiple of 8")
    args = parser.parse_args()
    # Else malloc gives freed memory back, and fresh pages cost 0 to 80 ms a step of any model, by
    # where its buffers happen to lie. The ranks read these when they start.
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"):
        os.environ[name] = "2000000000"
    times = run_on_ranks(args.world_size, measure, args)[0]
    rows, result = [], {}
    for name in (*EVERY, ANOTHER):
        row = [name]
        for kind, values in times.items():
            part = ratio(values[name], values[BASE])
            result[f"{name}, {kind}"] = part.as_dict()
            row += [Spread.of(values[name]).text(1), part.text(4)]
        rows.append([*row, str(BARS.get(name, ""))])
    print_table(["verify", "step ms", "ratio", "processor ms", "ratio", "bar"], rows)
    print_json(
        {
            "benchmark": "verify",
            "ratios": result,
            "config": vars(args),
            "environment": environment(),
        }
    )


def measure(args: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Run on each rank: milliseconds a step by name, of the slowest rank."""
    model, verified = make_step("always", args)
    _, another = make_step(None, args)
    names = (*EVERY, ANOTHER)
    processor: dict[str, list[float]] = {name: [] for name in names}

    def step_ms(name: str) -> float:
        step = another if name == ANOTHER else verified
        if name != ANOTHER:
            context: Any = model._root_state.context
            context._every, context._num_passes = EVERY[name], 0
        gc.collect()
        dist.barrier()
        start, cpu_start = time.perf_counter(), time.process_time()
        for _ in range(args.steps):
            step()
        cpu_ms = (time.process_time() - cpu_start) / args.steps * 1e3
        elapsed_ms = (time.perf_counter() - start) / args.steps * 1e3
        processor[name].append(max_over_ranks(cpu_ms))
        return max_over_ranks(elapsed_ms)

    elapsed = interleave(list(names), step_ms, args.rounds, warmup=WARMUP_ROUNDS)
    return {
        "elapsed": elapsed,
        "processor": {name: values[WARMUP_ROUNDS:] for name, values in processor.items()},
    }


def make_step(verify: Any, args: argparse.Namespace) -> tuple[ZeRO3, Callable[[], None]]:
    torch.manual_seed(0)
    width, layers = SIZES[args.size]
    module = Transformer(width, layers, 8, args.length)
    model = ZeRO3(module, auto_wrap_policy={TransformerBlock}, verify=verify)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())

    def step() -> None:
        batch = torch.randint(256, (args.batch, args.length + 1), generator=generator)
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


if __name__ == "__main__":
    main()
