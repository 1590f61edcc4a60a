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
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from common import (
    Interval,
    Spread,
    keep_freed_memory,
    options,
    print_result,
    print_table,
    run_on_ranks,
    take_turns,
    to_two,
)
from torch import Tensor, nn

from layerzero import ZeRO3
from layerzero.build.build import Builder
from layerzero.step.root import RootState

BAR = 1.01


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
        join, plain = Builder.join, []

        def join_twice(*args: Any) -> RootState:
            plain.append(join(*args))
            return join(*args)

        with mock.patch.object(Builder, "join", join_twice):
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


def measure(args: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Run on each rank: for each case and clock, milliseconds by kind."""
    model = TwoEngines(args)
    gc.disable()
    for kind in KINDS:  # All have entered the towers once, so that both engines know the places.
        model.use(kind)
        model.step(True)
    found = {}
    for case in CASES:
        steps = dict.fromkeys(KINDS, partial(model.step, case == CASES[0]))
        times = take_turns(steps, args.rounds, warmup=2, before=model.use)
        found[f"{case}, elapsed"] = times.elapsed
        found[f"{case}, processor"] = times.processor
    return found


def main() -> None:
    parser = options(__doc__, width=256, rounds=60)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--depth", type=int, default=3, help="blocks of a tower")
    parser.add_argument("--trunk", type=int, default=6, help="blocks of the trunk")
    parser.add_argument("--towers", type=int, choices=(1, 2), default=2)
    parser.add_argument("--batch", type=int, default=512, help="rows of each rank")
    args = parser.parse_args()
    keep_freed_memory()
    rows, result = [], {}
    for name, of_kinds in run_on_ranks(args.ranks, measure, args)[0].items():
        ratios = to_two(of_kinds, "plain", "again")
        found = {kind: Interval.of(ratios[kind]) for kind in ("optional", "bare", "control")}
        plain = Spread.of(of_kinds["plain"])
        intervals = {kind: each._asdict() for kind, each in found.items()}
        result[name] = {"plain_ms": plain.as_dict(), **intervals}
        rows.append([f"{name} time", plain.text(1), *(each.text() for each in found.values())])
    print_table(["every step", "plain, ms", "optional", "bare", "control"], rows)
    print(f"the bar for optional, elapsed time: {BAR}")
    print_result(args, steps=result)


if __name__ == "__main__":
    main()
