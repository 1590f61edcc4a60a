"""What do separate groups for reductions, and several reductions in flight, do to a training step?

A transformer on gloo ranks of this machine, AdamW included. The variants take turns in each round,
so a ratio is within one round; the slowest rank counts.
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
from torch import Tensor

from layerzero import ReductionPolicy, ZeRO3

SIZES = {"tiny": (64, 2), "6m": (256, 8), "25m": (512, 8)}  # width, layers
VARIANTS = {
    "default": ReductionPolicy(),
    "separate groups": ReductionPolicy(separate_groups=True),
    "in flight": ReductionPolicy(in_flight="1GB"),
    "both": ReductionPolicy(separate_groups=True, in_flight="1GB"),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="6m")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--zero3-size", type=int, help="ranks of a shard group; default: all")
    parser.add_argument("--batch", type=int, default=2, help="sequences a rank")
    parser.add_argument("--length", type=int, default=128, help="bytes in a sequence")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=2, help="of each variant in a round")
    args = parser.parse_args()
    times = run_on_ranks(args.world_size, measure, args)[0]
    ratios = {name: ratio(values, times["default"]) for name, values in times.items()}
    print("ms a step, and over the default's in the same round: median (quartiles)")
    rows = [
        [name, Spread.of(values).text(0), ratios[name].text(3)] for name, values in times.items()
    ]
    print_table(["variant", "step", "over default"], rows)
    print_json(
        {
            "benchmark": "two_lanes",
            "step_ms": {name: Spread.of(values).as_dict() for name, values in times.items()},
            "over_default": {name: spread.as_dict() for name, spread in ratios.items()},
            "config": vars(args),
            "environment": environment(),
        }
    )


def measure(args: argparse.Namespace) -> dict[str, list[float]]:
    """Run on each rank: step times of every variant (slowest rank)."""
    steps = {name: make_step(policy, args) for name, policy in VARIANTS.items()}

    def step_ms(name: str) -> float:
        gc.collect()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(args.steps):
            steps[name]()
        return max_over_ranks((time.perf_counter() - start) / args.steps * 1e3)

    return interleave(list(VARIANTS), step_ms, args.rounds)


def make_step(policy: ReductionPolicy, args: argparse.Namespace) -> Callable[[], Tensor]:
    torch.manual_seed(0)
    width, layers = SIZES[args.size]
    options: dict[str, Any] = {} if args.zero3_size is None else {"zero3_size": args.zero3_size}
    model = ZeRO3(
        Transformer(width, layers, 8, args.length),
        auto_wrap_policy={TransformerBlock},
        reduction=policy,
        **options,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())

    def step() -> Tensor:
        batch = torch.randint(256, (args.batch, args.length + 1), generator=generator)
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


if __name__ == "__main__":
    main()
