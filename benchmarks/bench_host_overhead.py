"""How much host time does an engine add to each unit in a step?

Forward, backward and `zero_grad` of a model with units so small that their compute costs nearly
nothing, under torch's fake process group, which moves no bytes; the bare model's time is
subtracted. Times are process time, so other processes and waiting do not count. The optimizer is
left out for every engine (`--optimizer` includes it).

One correction: a fake all-gather copies the input once for each rank, and a fake reduce-scatter
splits its input into one view for each rank, which at 512 ranks takes as long as an engine's own
work, and slows down what comes after it. So every fake collective runs in a group of two ranks, on
64 elements, for each engine alike; the buffers around it keep their sizes. What still grows with
the number of ranks is an engine's own.
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
    difference,
    in_own_process,
    interleave,
    join_fake_world,
    options,
    print_json,
    print_result,
    print_table,
    ratio,
    spreads,
)
from engines import ENGINES
from torch import Tensor, nn

VERBS = ("all_gather_single", "_allgather_base", "reduce_scatter_single", "_reduce_scatter_base")
COMPARED = ("layerzero", "fully_shard", "fsdp1")


def main() -> None:
    defaults = {"world_sizes": [8, 512], "units": 24, "width": 16, "rounds": 15, "steps": 4}
    parser = options(__doc__, COMPARED, **defaults)
    parser.add_argument("--optimizer", action="store_true", help="take an SGD step in as well")
    parser.add_argument("--measure", type=int, metavar="WORLD_SIZE", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure is not None:
        print_json(measure(args))
        return
    results = {size: in_own_process(str(size)) for size in args.world_sizes}
    for size, result in results.items():
        _show(size, result)
    print_result(args, world_sizes=results)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all engines in this process, as rank 0 of `args.measure` ranks."""
    join_fake_world(args.measure)
    steps = {
        name: make_step(name, args.units, args.width, args.optimizer)
        for name in ["bare", *args.engines]
    }
    for step in steps.values():
        step()  # Compares ranks, for one.
    stub_collectives(dist.new_group([0, 1]))

    def step_ms(name: str) -> float:
        gc.collect()
        start = time.process_time()
        for _ in range(args.steps):
            steps[name]()
        return (time.process_time() - start) / args.steps / args.units * 1e3

    times = interleave(list(steps), step_ms, args.rounds, warmup=2)
    over = {name: difference(times[name], times["bare"]) for name in args.engines}
    result: dict[str, Any] = {
        "bare_ms_per_unit": Spread.of(times["bare"]).as_dict(),
        "ms_per_unit": spreads(over),
    }
    for other in ("fully_shard", "fsdp1"):
        if {"layerzero", other} <= over.keys():
            result[f"over_bare_vs_{other}"] = ratio(over["layerzero"], over[other]).as_dict()
    return result


def make_step(
    name: str, units: int, width: int, with_optimizer: bool = False
) -> Callable[[], None]:
    """Forward, backward and `zero_grad` of an engine's model of so many units."""
    torch.manual_seed(0)
    model = ENGINES[name](nn.Sequential(*(Unit(width) for _ in range(units))), Unit)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randn(1, width)

    def step() -> None:
        model(batch).sum().backward()
        if with_optimizer:
            optimizer.step()
        optimizer.zero_grad()

    return step


class Unit(nn.Module):
    """Eight parameters and almost no compute."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def stub_collectives(pair: dist.ProcessGroup) -> None:
    """Have every later fake collective run in this group of two ranks, on 64 elements."""
    one, both = torch.zeros(64), torch.zeros(128)
    for verb in VERBS:
        original = getattr(dist.ProcessGroup, verb, None)
        if original is None:
            continue
        given = (both, one) if "gather" in verb else (one, both)

        def call(
            group: Any, out: Any, own: Any, *rest: Any, original: Any = original, given: Any = given
        ) -> Any:
            return original(pair, *given, *rest)

        setattr(dist.ProcessGroup, verb, call)


def _show(world_size: int, result: dict[str, Any]) -> None:
    print(f"world size {world_size}: host time over the bare model, us per unit and step")
    rows = []
    for name, spread in result["ms_per_unit"].items():
        cells = [_us(spread)]
        versus = [result.get(f"over_bare_vs_{other}") for other in ("fully_shard", "fsdp1")]
        cells += [Spread(**each).text() if name == "layerzero" and each else "" for each in versus]
        rows.append([name, *cells])
    print_table(["engine", "median (quartiles)", "/ fully_shard", "/ fsdp1"], rows)
    print(f"bare model: {_us(result['bare_ms_per_unit'])}\n")


def _us(spread: dict[str, float]) -> str:
    return Spread(**{name: value * 1e3 for name, value in spread.items()}).text(0)


if __name__ == "__main__":
    main()
