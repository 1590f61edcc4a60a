"""What do optional modules cost in steps in which all ranks agree?

The same model with and without `optional_modules`, on gloo ranks, in steps in which every rank
enters all optional towers, and in steps in which every rank skips them. All have entered them
once before, so that the engine has seen where they come. Forward, backward and an AdamW step,
interleaved, so that ratios are those of steps under the same disturbances; processor time, in which
waiting for the other rank does not count, suffers least from them, and of it that of the thread
that runs the engine. All models train on the same batches, and end with the same weights to the
bit. Two models without `optional_modules` say how to read the ratios:

    control     the same as the first: what the measurement itself is worth
    bare        waits before each tower for an all-gather of 24 bytes, and does nothing with it:
                what no engine can avoid that asks the other ranks once a region
"""

from __future__ import annotations

import argparse
import gc
import os
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
    """A trunk with an optional tower before it and, of two, one behind it."""

    def __init__(
        self, width: int, depth: int, trunk: int, towers: int, before_tower: Callable[[], None]
    ) -> None:
        super().__init__()
        self.before_tower = before_tower
        self.first = _tower(width, depth)
        self.trunk = _tower(width, trunk)
        self.second = _tower(width, depth) if towers == 2 else None

    def forward(self, x: Tensor, enters: bool) -> Tensor:
        self.before_tower()
        x = self.trunk(self.first(x) if enters else x)
        if self.second is not None:
            self.before_tower()
            x = self.second(x) if enters else x
        return x.square().mean()


def _tower(width: int, depth: int) -> nn.Sequential:
    return nn.Sequential(*(Block(width) for _ in range(depth)))


CASES = ("all enter", "all skip")
KINDS = ("plain", "control", "bare", "optional")
CLOCKS: dict[str, Callable[[], float]] = {
    "elapsed": time.perf_counter,
    "processor": time.process_time,
    "engine's thread": time.thread_time,
}


def measure(args: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """For each clock: milliseconds of each step by name, of the slowest rank."""
    steps: dict[str, Callable[[], None]] = {}
    models: dict[str, list[ZeRO3]] = {case: [] for case in CASES}
    for case in CASES:
        for kind in KINDS:
            model, steps[f"{case}, {kind}"] = _make_step(case == CASES[0], kind, args)
            models[case].append(model)
    found: dict[str, dict[str, list[float]]] = {
        clock: {name: [] for name in steps} for clock in CLOCKS
    }

    def measure_one(name: str) -> float:
        gc.collect()
        dist.barrier()
        starts = {name: clock() for name, clock in CLOCKS.items()}
        for _ in range(args.steps):
            steps[name]()
        spent = [clock() - starts[of] for of, clock in CLOCKS.items()]
        for of, seconds in zip(CLOCKS, spent, strict=True):
            found[of][name].append(max_over_ranks(seconds / args.steps * 1e3))
        return 0.0

    interleave(list(steps), measure_one, args.rounds, warmup=WARMUP_ROUNDS)
    for plain, *others in models.values():
        for other in others:
            for one, two in zip(plain.parameters(), other.parameters(), strict=True):
                assert torch.equal(one, two), "optional modules changed the numbers"
    return {
        clock: {name: values[WARMUP_ROUNDS:] for name, values in of_steps.items()}
        for clock, of_steps in found.items()
    }


def _make_step(
    enters: bool, kind: str, args: argparse.Namespace
) -> tuple[ZeRO3, Callable[[], None]]:
    torch.manual_seed(0)
    before_tower = _exchange if kind == "bare" else _nothing
    module = Towers(args.width, args.depth, args.trunk, args.towers, before_tower)
    towers = [each for each in (module.first, module.second) if each is not None]
    if kind != "optional":
        towers = []
    model = ZeRO3(module, auto_wrap_policy={Block}, optional_modules=towers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = torch.randn(args.batch, args.width, generator=torch.Generator().manual_seed(0))

    def step(enters: bool = enters) -> None:
        model(batch, enters).backward()
        optimizer.step()
        optimizer.zero_grad()

    step(True)
    return model, step


def _exchange() -> None:
    own = torch.tensor([dist.get_rank(), 0, 0])
    dist.all_gather([torch.empty_like(own) for _ in range(dist.get_world_size())], own)


def _nothing() -> None:
    """Before the towers of the other models."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=3, help="blocks of a tower")
    parser.add_argument("--trunk", type=int, default=6, help="blocks of the trunk")
    parser.add_argument("--towers", type=int, choices=(1, 2), default=2)
    parser.add_argument("--batch", type=int, default=512, help="rows of each rank")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=2, help="of each model in a round")
    args = parser.parse_args()
    # Else malloc gives freed memory back, and a step of any model takes up to thousands of fresh
    # pages, by where its buffers happen to lie. The ranks read these when they start.
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"):
        os.environ[name] = "2000000000"
    times = run_on_ranks(args.ranks, measure, args)[0]
    result: dict[str, Any] = {}
    rows = []
    for clock, of_steps in times.items():
        for case in CASES:
            plain, control, bare, optional = (of_steps[f"{case}, {kind}"] for kind in KINDS)
            ratios, same = ratio(optional, plain), ratio(control, plain)
            least, over = ratio(bare, plain), ratio(optional, bare)
            result[f"{case}, {clock}"] = {
                "plain_ms": Spread.of(plain).as_dict(),
                "optional_ms": Spread.of(optional).as_dict(),
                "optional_over_plain": ratios.as_dict(),
                "control_over_plain": same.as_dict(),
                "bare_over_plain": least.as_dict(),
                "optional_over_bare": over.as_dict(),
            }
            texts = [Spread.of(each).text(1) for each in (plain, optional)]
            ratios_shown = (each.text(3) for each in (ratios, same, least, over))
            rows.append([f"{case}, {clock} time", *texts, *ratios_shown])
    header = ["every step", "plain, ms", "optional_modules, ms"]
    header += ["optional / plain", "control / plain", "bare / plain", "optional / bare"]
    print_table(header, rows)
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
