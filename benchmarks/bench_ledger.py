"""What does a ledger cost? Steps of one model inside `layerzero.ledger` and without.

A transformer on gloo ranks of this machine, AdamW included. Both take turns in each round, on the
same model, so a ratio is within one round; the slowest rank counts. Entering and leaving, which
exchange clocks and records, are timed apart. Elapsed time, and processor time of a rank, which
waits and other processes disturb least.
"""

from __future__ import annotations

import argparse
import gc
import time
from contextlib import nullcontext

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

import layerzero
from layerzero import ZeRO3

SIZES = {"tiny": (64, 2), "6m": (256, 8), "25m": (512, 8)}  # width, layers
BAR = 1.02
PLAIN, LEDGER = "plain", "ledger"
WARMUP_ROUNDS = 1

Times = dict[str, dict[str, list[float]]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="25m")
    parser.add_argument("--batch", type=int, default=2, help="sequences a rank")
    parser.add_argument("--length", type=int, default=128, help="bytes in a sequence")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=4, help="of each in a round")
    args = parser.parse_args()
    times, around = run_on_ranks(args.world_size, measure, args)[0]
    rows, result = [], {}
    for name in (PLAIN, LEDGER):
        row = [name]
        for kind, values in times.items():
            part = ratio(values[name], values[PLAIN])
            result[f"{name}, {kind}"] = part.as_dict()
            row += [Spread.of(values[name]).text(1), part.text(4)]
        rows.append([*row, str(BAR) if name == LEDGER else ""])
    print_table(["", "step ms", "ratio", "processor ms", "ratio", "bar"], rows)
    print(f"entering and leaving, once: {Spread.of(around).text(1)} ms")
    print_json(
        {
            "benchmark": "ledger",
            "ratios": result,
            "enter_and_leave_ms": Spread.of(around).as_dict(),
            "config": vars(args),
            "environment": environment(),
        }
    )


def measure(args: argparse.Namespace) -> tuple[Times, list[float]]:
    """Run on each rank: milliseconds a step by name, of the slowest rank; and around a block."""
    torch.manual_seed(0)
    width, layers = SIZES[args.size]
    model = ZeRO3(Transformer(width, layers, 8, args.length), auto_wrap_policy={TransformerBlock})
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    processor: dict[str, list[float]] = {PLAIN: [], LEDGER: []}
    around: list[float] = []

    def step() -> None:
        batch = torch.randint(256, (args.batch, args.length + 1), generator=generator)
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    def step_ms(name: str) -> float:
        gc.collect()
        dist.barrier()
        whole = time.perf_counter()
        with layerzero.ledger(model) if name == LEDGER else nullcontext():
            dist.barrier()
            start, cpu_start = time.perf_counter(), time.process_time()
            for _ in range(args.steps):
                step()
            cpu_s = time.process_time() - cpu_start
            elapsed_s = time.perf_counter() - start
        if name == LEDGER:
            around.append((time.perf_counter() - whole - elapsed_s) * 1e3)
        processor[name].append(max_over_ranks(cpu_s / args.steps * 1e3))
        return max_over_ranks(elapsed_s / args.steps * 1e3)

    elapsed = interleave([PLAIN, LEDGER], step_ms, args.rounds, warmup=WARMUP_ROUNDS)
    kept = {name: values[WARMUP_ROUNDS:] for name, values in processor.items()}
    return {"elapsed": elapsed, "processor": kept}, around[WARMUP_ROUNDS:]


if __name__ == "__main__":
    main()
