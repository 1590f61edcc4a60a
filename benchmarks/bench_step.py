"""How long is a training step, and how much memory does it take, under each engine?

A transformer on gloo ranks of this machine, AdamW included. Every engine trains the same model on
the same data with its defaults; the bare model trains without communication. The engines take turns
in each round, so a ratio is within one round; the slowest rank counts. gloo's threads are scheduled
as each engine's users have them (`let_gloo_wait`). Peak bytes come from a separate untimed run
(memory.py explains how they are counted). DeepSpeed takes part where it is installed (peers.py).
"""

from __future__ import annotations

import argparse
import gc
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from common import (
    Spread,
    add_engine_flag,
    difference,
    environment,
    interleave,
    let_gloo_wait,
    max_over_ranks,
    print_json,
    print_table,
    ratio,
    run_on_ranks,
)
from engines import ENGINES, Tower, TowerBlock, Transformer, TransformerBlock
from memory import peak_bytes, self_check
from peers import PEERS, deepspeed, installed_peers
from torch import Tensor, nn

LEARNING_RATE = 3e-4
SIZES = {"tiny": (64, 2), "6m": (256, 8), "25m": (512, 8)}  # width, layers


@dataclass(frozen=True)
class Config:
    width: int
    layers: int
    heads: int
    batch: int
    length: int
    rounds: int
    steps: int
    model: str = "transformer"
    low: bool = False
    """Whether it computes in bfloat16, from float32 weights."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_engine_flag(parser, (*ENGINES, *installed_peers()))
    parser.add_argument("--size", choices=SIZES, default="25m")
    parser.add_argument("--model", choices=("transformer", "tower"), default="transformer")
    parser.add_argument("--precision", choices=("bf16", "float32"), default="bf16")
    parser.add_argument("--width", type=int, help="instead of the size's")
    parser.add_argument("--layers", type=int, help="instead of the size's")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--batch", type=int, default=2, help="sequences a rank")
    parser.add_argument("--length", type=int, default=128, help="bytes in a sequence")
    parser.add_argument("--world-size", type=int, nargs="+", default=[2], help="one or several")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2, help="of each engine in a round")
    measured = parser.add_mutually_exclusive_group()
    measured.add_argument("--no-peak", action="store_true", help="measure the time only")
    measured.add_argument("--peak-only", action="store_true", help="measure no time")
    args = parser.parse_args()
    width, layers = SIZES[args.size]
    config = Config(
        width=args.width or width,
        layers=args.layers or layers,
        heads=args.heads,
        batch=args.batch,
        length=args.length,
        rounds=args.rounds,
        steps=args.steps,
        model=args.model,
        low=args.precision == "bf16",
    )
    self_check()
    results = {}
    for world_size in args.world_size:
        results[world_size] = _measured(args, config, world_size)
        _show(
            results[world_size],
            args.engines,
            f"{args.model}, {args.precision}, {world_size} ranks, {args.batch} x {args.length}",
        )
    print_json(
        {
            "benchmark": "step",
            "world_sizes": results,
            "config": vars(args) | vars(config),
            "environment": environment(),
        }
    )


def _measured(args: argparse.Namespace, config: Config, world_size: int) -> dict[str, Any]:
    timing: dict[str, Any] = {"times": {}, "losses": {}, "num_parameters": _num_parameters(config)}
    if not args.peak_only:
        timing |= run_on_ranks(world_size, measure_time, config, args.engines)[0]
    peaks = {}
    if not args.no_peak:
        for name in args.engines:
            peaks[name] = max(run_on_ranks(world_size, measure_peak, config, name))
    return _summary(timing, peaks, args.engines)


def measure_time(config: Config, names: list[str]) -> dict[str, Any]:
    """Run on each rank: step times of every engine (slowest rank), and first losses."""
    steps = {name: make_step(name, config) for name in names}
    losses: dict[str, list[float]] = {name: [] for name in names}

    def step_ms(name: str) -> float:
        let_gloo_wait(name == "layerzero")
        gc.collect()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(config.steps):
            losses[name].append(steps[name]().item())
        return max_over_ranks((time.perf_counter() - start) / config.steps * 1e3)

    times = interleave(names, step_ms, config.rounds)
    return {"times": times, "losses": losses}


def measure_peak(config: Config, name: str) -> int:
    """Run on each rank: peak bytes of one engine."""
    # A first step at the smallest size, so that imports of the engine and workspaces of the math
    # library do not count.
    width, layers = SIZES["tiny"]
    make_step(name, replace(config, width=width, layers=layers))()
    return peak_bytes(lambda: make_step(name, config))


def build(config: Config) -> nn.Module:
    torch.manual_seed(0)
    if config.model == "tower":
        return Tower(config.width, config.layers)
    return Transformer(config.width, config.layers, config.heads, config.length)


def _num_parameters(config: Config) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build(config).parameters())


def make_step(name: str, config: Config) -> Callable[[], Tensor]:
    """One training step of an engine, each on its rank's next batch; returns the loss."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    if name in PEERS:
        step = deepspeed(build(config), LEARNING_RATE, config.batch)
    else:
        unit = TowerBlock if config.model == "tower" else TransformerBlock
        step = _torch_step(ENGINES[name](build(config), unit, config.low))
    generator = torch.Generator().manual_seed(1 + dist.get_rank())

    def next_step() -> Tensor:
        shape = (config.batch, config.length + 1)
        return step(torch.randint(256, shape, generator=generator))

    return next_step


def _torch_step(model: nn.Module) -> Callable[[Tensor], Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)

    def step(batch: Tensor) -> Tensor:
        loss: Tensor = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _summary(timing: dict[str, Any], peaks: dict[str, int], names: list[str]) -> dict[str, Any]:
    times = timing["times"]
    over_bare = {
        name: difference(times[name], times["bare"])
        for name in times
        if name != "bare" and "bare" in times
    }
    result: dict[str, Any] = {
        "num_parameters": timing["num_parameters"],
        "step_ms": {name: Spread.of(values).as_dict() for name, values in times.items()},
        "over_bare_ms": {name: Spread.of(values).as_dict() for name, values in over_bare.items()},
        "peak_bytes": peaks,
    }
    engines = [name for name in names if name not in ("bare", "ddp")]
    result["losses_equal"] = {
        name: timing["losses"][name] == timing["losses"][engines[0]]
        for name in timing["losses"]
        if engines and name != "bare"
    }
    if "layerzero" in names:
        for other in ("fully_shard", "fsdp1", *PEERS):
            if other in over_bare and "layerzero" in over_bare:
                spread = ratio(over_bare["layerzero"], over_bare[other])
                result[f"over_bare_vs_{other}"] = spread.as_dict()
        for other in ("ddp", "fully_shard", "fsdp1", *PEERS):
            if other in times:
                result[f"step_vs_{other}"] = ratio(times["layerzero"], times[other]).as_dict()
            if other in peaks and "layerzero" in peaks:
                result[f"peak_vs_{other}"] = round(peaks["layerzero"] / peaks[other], 4)
    return result


def _show(result: dict[str, Any], names: list[str], where: str) -> None:
    title = f"{result['num_parameters'] / 1e6:.1f} M parameters, {where}"
    peaks = {name: f"{peak / 1e6:.1f}" for name, peak in result["peak_bytes"].items()}
    if result["step_ms"]:
        print(f"{title}; ms a step, median (quartiles)")
        rows = []
        for name in names:
            over = result["over_bare_ms"].get(name)
            step = Spread(**result["step_ms"][name]).text(0)
            rows.append([name, step, Spread(**over).text(0) if over else "", peaks.get(name, "")])
        print_table(["engine", "step", "over bare", "peak MB"], rows)
    else:
        print(f"{title}; peak of the fullest rank")
        print_table(["engine", "peak MB"], [[name, peaks[name]] for name in names])
    for key, value in result.items():
        if "_vs_" in key:
            print(f"{key}: {Spread(**value).text() if isinstance(value, dict) else value}")
    print()


if __name__ == "__main__":
    main()
