"""How much host time does an engine add to each unit in a step?

Forward, backward and `zero_grad` of a model with units so small that their compute costs nearly
nothing, under torch's fake process group, which moves no bytes; the bare model's time is
subtracted. Times are process time, so other processes and waiting do not count. The optimizer is
left out for every engine (`--optimizer` includes it).

One correction: a fake all-gather copies the input once for each rank, and a fake reduce-scatter
splits its input into one view for each rank, which at 512 ranks takes as long as an engine's own
work. So these calls are timed, and each counts with its cost in a group of two ranks; the column
"as run" has them at full cost.

The tensors that they make for each rank also slow down what comes after them. With `--stub` every
fake collective runs in a group of two ranks instead, on 64 elements; the buffers around it keep
their sizes. What still grows with the number of ranks is an engine's own.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from common import (
    Spread,
    add_engine_flag,
    difference,
    environment,
    interleave,
    print_json,
    print_table,
    ratio,
)
from engines import ENGINES
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

WARMUP_ROUNDS = 2
COMPARED = ("layerzero", "fully_shard", "fsdp1")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_engine_flag(parser, COMPARED)
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[8, 512])
    parser.add_argument("--units", type=int, default=24)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=4, help="of each engine in a round")
    parser.add_argument("--optimizer", action="store_true", help="take an SGD step in as well")
    parser.add_argument("--stub", action="store_true", help="collectives in groups of two ranks")
    parser.add_argument("--measure", type=int, metavar="WORLD_SIZE", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure is not None:
        print_json(measure(args))
        return
    results = {size: _in_own_process(size) for size in args.world_sizes}
    for size, result in results.items():
        _show(size, result)
    print_json(
        {
            "benchmark": "host_overhead",
            "config": {key: value for key, value in vars(args).items() if key != "measure"},
            "environment": environment(),
            "world_sizes": results,
        }
    )


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all engines in this process, as rank 0 of `args.measure` ranks."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=args.measure, store=FakeStore())
    pair = dist.new_group([0, 1])
    steps = {
        name: make_step(name, args.units, args.width, args.optimizer)
        for name in ["bare", *args.engines]
    }

    if args.stub:
        for step in steps.values():
            step()
        stub_collectives(pair)
    clock = _CollectiveClock()
    surplus: dict[str, list[float]] = {name: [] for name in steps}
    pair_ms = clock.calibrate(pair)

    def step_ms(name: str) -> float:
        gc.collect()
        clock.reset()
        start = time.process_time()
        for _ in range(args.steps):
            steps[name]()
        total = (time.process_time() - start) / args.steps * 1e3
        surplus[name].append(clock.surplus_ms(pair_ms) / args.steps)
        return total

    times = interleave(list(steps), step_ms, args.rounds, warmup=WARMUP_ROUNDS)
    return _summary(times, {name: values[WARMUP_ROUNDS:] for name, values in surplus.items()}, args)


def _summary(
    times: dict[str, list[float]], surplus: dict[str, list[float]], args: argparse.Namespace
) -> dict[str, Any]:
    as_run = {
        name: [value / args.units for value in difference(times[name], times["bare"])]
        for name in args.engines
    }
    corrected = {
        name: difference(values, [value / args.units for value in surplus[name]])
        for name, values in as_run.items()
    }
    result: dict[str, Any] = {
        "bare_ms_per_unit": Spread.of([value / args.units for value in times["bare"]]).as_dict(),
        "ms_per_unit": {name: Spread.of(values).as_dict() for name, values in corrected.items()},
        "as_run_ms_per_unit": {
            name: Spread.of(values).as_dict() for name, values in as_run.items()
        },
    }
    for other in ("fully_shard", "fsdp1"):
        if {"layerzero", other} <= set(args.engines):
            result[f"over_bare_vs_{other}"] = ratio(
                corrected["layerzero"], corrected[other]
            ).as_dict()
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
    one, both = torch.zeros(64), torch.zeros(128)
    for verb in _CollectiveClock.VERBS:
        original = getattr(dist.ProcessGroup, verb, None)
        if original is None or verb == "allgather":
            continue
        given = (both, one) if "gather" in verb else (one, both)

        def call(
            group: Any, out: Any, own: Any, *rest: Any, original: Any = original, given: Any = given
        ) -> Any:
            return original(pair, *given, *rest)

        setattr(dist.ProcessGroup, verb, call)


class _CollectiveClock:
    """Times those fake collectives whose cost grows with the group."""

    VERBS = (
        *("all_gather_single", "_allgather_base", "allgather"),
        *("reduce_scatter_single", "_reduce_scatter_base"),
    )

    def __init__(self) -> None:
        self._ms: dict[str, list[float]] = {}
        for verb in self.VERBS:
            if hasattr(dist.ProcessGroup, verb):
                setattr(dist.ProcessGroup, verb, self._timed(verb))

    def reset(self) -> None:
        self._ms.clear()

    def calibrate(self, pair: dist.ProcessGroup) -> dict[str, float]:
        """Milliseconds of each verb in a group of two ranks."""
        self.reset()
        one, both = torch.zeros(64), torch.zeros(128)
        for _ in range(200):
            dist.all_gather_into_tensor(both, one, group=pair)
            dist.all_gather(list(both.chunk(2)), one, group=pair)
            dist.reduce_scatter_tensor(one, both, group=pair)
        return {verb: Spread.of(times).median for verb, times in self._ms.items()}

    def surplus_ms(self, pair_ms: dict[str, float]) -> float:
        """Milliseconds that the calls since `reset` took beyond their cost in a group of two."""
        return sum(sum(times) - len(times) * pair_ms[verb] for verb, times in self._ms.items())

    def _timed(self, verb: str) -> Callable[..., Any]:
        original = getattr(dist.ProcessGroup, verb)

        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time_ns()
            work = original(*args, **kwargs)
            self._ms.setdefault(verb, []).append((time.process_time_ns() - start) / 1e6)
            return work

        return call


def _in_own_process(world_size: int) -> dict[str, Any]:
    command = [sys.executable, *sys.argv, "--measure", str(world_size)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"world size {world_size}: exit code {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def _show(world_size: int, result: dict[str, Any]) -> None:
    print(f"world size {world_size}: host time over the bare model, us per unit and step")
    rows = []
    for name, spread in result["ms_per_unit"].items():
        cells = [_us(spread), _us(result["as_run_ms_per_unit"][name])]
        versus = [result.get(f"over_bare_vs_{other}") for other in ("fully_shard", "fsdp1")]
        cells += [Spread(**each).text() if name == "layerzero" and each else "" for each in versus]
        rows.append([name, *cells])
    print_table(["engine", "median (quartiles)", "as run", "/ fully_shard", "/ fsdp1"], rows)
    print(f"bare model: {_us(result['bare_ms_per_unit'])}\n")


def _us(spread: dict[str, float]) -> str:
    return Spread(**{name: value * 1e3 for name, value in spread.items()}).text(0)


if __name__ == "__main__":
    main()
