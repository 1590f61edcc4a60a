"""What do optional modules cost in steps in which all ranks agree?

The same model with and without `optional_modules`, on gloo ranks, in steps in which every rank
enters both optional towers, and in steps in which every rank skips them. Forward, backward and an
AdamW step, interleaved, so that ratios are those of steps under the same disturbances; processor
time, in which waiting for the other rank does not count, suffers least from them. Both models train
on the same batches, and end with the same weights to the bit.
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
from torch import Tensor, nn

from layerzero import ZeRO3

WARMUP_ROUNDS = 3


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Towers(nn.Module):
    """A trunk with an optional tower before it and one behind it."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.first = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.trunk = nn.Sequential(*(Block(width) for _ in range(2 * depth)))
        self.second = nn.Sequential(*(Block(width) for _ in range(depth)))

    def forward(self, x: Tensor, enters: bool) -> Tensor:
        x = self.trunk(self.first(x) if enters else x)
        return (self.second(x) if enters else x).square().mean()  # type: ignore[no-any-return]


def measure(args: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Milliseconds of each step by name, of the slowest rank: elapsed, and processor time."""
    steps: dict[str, Callable[[], None]] = {}
    models = []
    for enters in (True, False):
        for optional in (True, False):
            name = f"{'all enter' if enters else 'all skip'}, {'optional' if optional else 'plain'}"
            model, steps[name] = _make_step(enters, optional, args)
            models.append(model)

    cpu: dict[str, list[float]] = {name: [] for name in steps}

    def step_ms(name: str) -> float:
        gc.collect()
        dist.barrier()
        start, cpu_start = time.perf_counter(), time.process_time()
        for _ in range(args.steps):
            steps[name]()
        cpu_ms = (time.process_time() - cpu_start) / args.steps * 1e3
        elapsed_ms = (time.perf_counter() - start) / args.steps * 1e3
        cpu[name].append(max_over_ranks(cpu_ms))
        return max_over_ranks(elapsed_ms)

    elapsed = interleave(list(steps), step_ms, args.rounds, warmup=WARMUP_ROUNDS)
    for left, right in (models[:2], models[2:]):
        for one, other in zip(left.parameters(), right.parameters(), strict=True):
            assert torch.equal(one, other), "optional modules changed the numbers"
    return {
        "elapsed": elapsed,
        "processor": {name: values[WARMUP_ROUNDS:] for name, values in cpu.items()},
    }


def _make_step(
    enters: bool, optional: bool, args: argparse.Namespace
) -> tuple[ZeRO3, Callable[[], None]]:
    torch.manual_seed(0)
    module = Towers(args.width, args.depth)
    towers = [module.first, module.second] if optional else []
    model = ZeRO3(module, auto_wrap_policy={Block}, optional_modules=towers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = torch.randn(args.batch, args.width, generator=torch.Generator().manual_seed(0))

    def step() -> None:
        model(batch, enters).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=3, help="blocks of a tower; a trunk has twice")
    parser.add_argument("--batch", type=int, default=512, help="rows of each rank")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=2, help="of each model in a round")
    args = parser.parse_args()
    times = run_on_ranks(args.ranks, measure, args)[0]
    result: dict[str, Any] = {}
    rows = []
    for kind, of_steps in times.items():
        for case in ("all enter", "all skip"):
            optional, plain = of_steps[f"{case}, optional"], of_steps[f"{case}, plain"]
            ratios = ratio(optional, plain)
            result[f"{case}, {kind}"] = {
                "plain_ms": Spread.of(plain).as_dict(),
                "optional_ms": Spread.of(optional).as_dict(),
                "optional_over_plain": ratios.as_dict(),
            }
            texts = [Spread.of(each).text(1) for each in (plain, optional)]
            rows.append([f"{case}, {kind} time", *texts, ratios.text(3)])
    print_table(["every step", "plain, ms", "optional_modules, ms", "ratio in a round"], rows)
    print_json(
        {
            "benchmark": "optional",
            "config": vars(args),
            "environment": environment(),
            "steps": result,
        }
    )


if __name__ == "__main__":
    main()
