"""What do optional modules cost in steps in which all ranks agree?

One model on gloo ranks, in steps in which every rank enters all optional towers, and in steps in
which every rank skips them. Forward, backward and an AdamW step. It has two engines, with and
without `optional_modules`, over the same weights and buffers, because two equal models differ by
more than is asked, by where their memory lies. Single steps of each kind, once in a round, in
changing order; all have run with both, so that the engines know the orders. The kinds:

    plain     without `optional_modules`
    again     the same once more: its ratio to "plain" is the control, whose interval must hold 1,
              and which any ratio has to be compared with
    bare      without, but it waits before each tower for an all-gather of 24 bytes, and does
              nothing with it: what no engine can avoid that asks the other ranks once a region
    optional  with `optional_modules`

A ratio is within one round, to the mean of "plain" and "again". Given are the median of the rounds
and the interval that holds it with 95 % (bootstrap). Time is that of the slowest rank; processor
time, user and system, is that of all ranks, in which waiting for another does not count.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from common import (
    Interval,
    Spread,
    environment,
    interleave,
    keep_freed_memory,
    max_over_ranks,
    print_json,
    print_table,
    run_on_ranks,
)
from torch import Tensor, nn

from layerzero import ZeRO3
from layerzero.build import build
from layerzero.step.root import RootState

BAR = 1.01
WARMUP_ROUNDS = 2


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

    def __init__(self, width: int, depth: int, trunk: int, towers: int) -> None:
        super().__init__()
        self.before_tower: Callable[[], None] = _nothing
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


def _exchange() -> None:
    own = torch.tensor([dist.get_rank(), 0, 0])
    dist.all_gather([torch.empty_like(own) for _ in range(dist.get_world_size())], own)


def _nothing() -> None:
    """Before the towers of the other kinds."""


CASES = ("all enter", "all skip")
KINDS = ("plain", "again", "bare", "optional")


class TwoEngines:
    """A model that trains with or without its `optional_modules`."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Collective."""
        torch.manual_seed(0)
        self._module = Towers(args.width, args.depth, args.trunk, args.towers)
        towers = [each for each in (self._module.first, self._module.second) if each is not None]
        join, plain = build.join_units, []

        def join_twice(*args: Any) -> RootState:
            plain.append(join(*args))
            return join(*args)

        with mock.patch.object(build, "join_units", join_twice):
            self._model = ZeRO3(self._module, auto_wrap_policy={Block}, optional_modules=towers)
        self._optional = self._model._root_state
        (self._plain,) = plain
        self._plain.wrapper_ref = self._optional.wrapper_ref
        self._optional_units = [unit for unit in self._optional.units if unit.is_optional]
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4)
        generator = torch.Generator().manual_seed(dist.get_rank())
        self._batch = torch.randn(args.batch, args.width, generator=generator)

    def use(self, kind: str) -> None:
        """Have the next steps be of this kind; between steps."""
        is_optional = kind == "optional"
        (self._optional if is_optional else self._plain)._join_units()
        for unit in self._optional_units:
            unit.set_optional(is_optional)
        self._module.before_tower = _exchange if kind == "bare" else _nothing

    def step(self, enters: bool) -> None:
        self._model(self._batch, enters).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


def measure(args: argparse.Namespace) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Run on each rank: for each clock and case, milliseconds by kind."""
    model = TwoEngines(args)
    processor: dict[str, dict[str, list[float]]] = {}
    elapsed: dict[str, dict[str, list[float]]] = {}

    def step_ms(kind: str, enters: bool, of_kinds: dict[str, list[float]]) -> float:
        model.use(kind)
        gc.collect()
        dist.barrier()
        start, cpu_start = time.perf_counter(), time.process_time()
        model.step(enters)
        cpu_ms = (time.process_time() - cpu_start) * 1e3
        elapsed_ms = (time.perf_counter() - start) * 1e3
        total = torch.tensor([cpu_ms], dtype=torch.float64)
        dist.all_reduce(total)
        of_kinds[kind].append(total.item())
        return max_over_ranks(elapsed_ms)

    gc.disable()
    for kind in KINDS:  # All have entered the towers once, so that both engines know the places.
        model.use(kind)
        model.step(True)
    for case in CASES:
        of_kinds: dict[str, list[float]] = {kind: [] for kind in KINDS}
        timed = partial(step_ms, enters=case == CASES[0], of_kinds=of_kinds)
        elapsed[case] = interleave(list(KINDS), timed, args.rounds, warmup=WARMUP_ROUNDS)
        processor[case] = {kind: values[WARMUP_ROUNDS:] for kind, values in of_kinds.items()}
    return {"elapsed": elapsed, "processor": processor}


def ratios(times: dict[str, list[float]]) -> dict[str, list[float]]:
    """Of each round, to steps without `optional_modules`; and the control."""
    result: dict[str, list[float]] = {"optional": [], "bare": [], "control": []}
    for plain, again, bare, optional in zip(*(times[kind] for kind in KINDS), strict=True):
        base = (plain + again) / 2
        result["optional"].append(optional / base)
        result["bare"].append(bare / base)
        result["control"].append(again / plain)
    return result


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
    parser.add_argument("--rounds", type=int, default=60)
    args = parser.parse_args()
    keep_freed_memory()
    times = run_on_ranks(args.ranks, measure, args)[0]
    rows, result = [], {}
    for clock, of_cases in times.items():
        for case, of_kinds in of_cases.items():
            found = {name: Interval.of(each) for name, each in ratios(of_kinds).items()}
            plain = Spread.of(of_kinds["plain"])
            result[f"{case}, {clock}"] = {
                "plain_ms": plain.as_dict(),
                **{name: each._asdict() for name, each in found.items()},
            }
            cells = [each.text() for each in found.values()]
            rows.append([f"{case}, {clock} time", plain.text(1), *cells])
    print_table(["every step", "plain, ms", "optional", "bare", "control"], rows)
    print(f"the bar for optional, elapsed time: {BAR}")
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
