"""What do checked bytes cost? The same model without verification, "sampled" and "always".

A transformer on gloo ranks of this machine, AdamW included. The three take turns in each round, so
a ratio is within one round; the slowest rank counts. A round of steps is a multiple of 8, of which
"sampled" checks one. Elapsed time, and processor time of a rank, which waits and other processes
disturb least. All three end with the same weights to the bit, which is checked.
"""

from __future__ import annotations

import argparse
import gc
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
BARS = {"sampled": 1.01, "always": 1.05}
PLAIN = "plain"
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
    parser.add_argument("--names", nargs="+", default=[PLAIN, *BARS])
    args = parser.parse_args()
    times = run_on_ranks(args.world_size, measure, args)[0]
    rows, result = [], {}
    for name in args.names:
        row = [name]
        for kind, values in times.items():
            part = ratio(values[name], values[PLAIN])
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
    made = {name: make_step(name, args) for name in args.names}
    processor: dict[str, list[float]] = {name: [] for name in made}

    def step_ms(name: str) -> float:
        gc.collect()
        dist.barrier()
        start, cpu_start = time.perf_counter(), time.process_time()
        for _ in range(args.steps):
            made[name][1]()
        cpu_ms = (time.process_time() - cpu_start) / args.steps * 1e3
        elapsed_ms = (time.perf_counter() - start) / args.steps * 1e3
        processor[name].append(max_over_ranks(cpu_ms))
        return max_over_ranks(elapsed_ms)

    elapsed = interleave(list(made), step_ms, args.rounds, warmup=WARMUP_ROUNDS)
    for name in args.names:
        for one, other in zip(made[name][0].parameters(), made[PLAIN][0].parameters(), strict=True):
            assert torch.equal(one, other), "verification changed the numbers"
    return {
        "elapsed": elapsed,
        "processor": {name: values[WARMUP_ROUNDS:] for name, values in processor.items()},
    }


def make_step(name: str, args: argparse.Namespace) -> tuple[ZeRO3, Callable[[], None]]:
    torch.manual_seed(0)
    width, layers = SIZES[args.size]
    module = Transformer(width, layers, 8, args.length)
    verify: Any = None if name == PLAIN else name
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
