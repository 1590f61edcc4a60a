"""How long is a step of Muon on sharded matrices, and how much Newton-Schulz does a rank do?

The matrices of a transformer's blocks on gloo ranks of this machine, with torch.optim.Muon:

    fully_shard   what a user would write: each rank keeps all whole matrices, gathers each gradient
                  with full_tensor(), runs Muon on all of them, and copies its rows back
    layerzero     WholeTensorOptimizer: each matrix has one owner rank

Both step the same gradients, and take turns in each round; the slowest rank counts. Matrix products
of one step are counted, not timed, in a separate run.
"""

from __future__ import annotations

import argparse
import gc
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
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
from engines import ENGINES, Transformer, TransformerBlock
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Muon
from torch.utils.flop_counter import FlopCounterMode

NAMES = ("fully_shard", "layerzero")
LR = 0.02


@dataclass(frozen=True)
class Config:
    width: int
    layers: int
    rounds: int
    steps: int


@dataclass
class Engine:
    step: Callable[[], None]
    held_numel: int
    """Elements of whole matrices that this rank keeps."""
    values: Callable[[], list[torch.Tensor]]
    """Full values of the matrices. Collective."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2, help="of each engine in a round")
    args = parser.parse_args()
    config = Config(args.width, args.layers, args.rounds, args.steps)
    results = {}
    for world_size in args.world_sizes:
        ranks = run_on_ranks(world_size, measure, config)
        results[str(world_size)] = _summary(ranks)
        _show(world_size, results[str(world_size)])
    print_json(
        {
            "benchmark": "muon",
            "ranks": results,
            "config": vars(args),
            "environment": environment(),
        }
    )


def measure(config: Config) -> dict[str, Any]:
    """Run on each rank: step times (slowest rank), products and elements of each engine."""
    warnings.filterwarnings("ignore")
    engines = {name: MAKERS[name](config) for name in NAMES}

    def step_ms(name: str) -> float:
        gc.collect()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(config.steps):
            engines[name].step()
        return max_over_ranks((time.perf_counter() - start) / config.steps * 1e3)

    times = interleave(NAMES, step_ms, config.rounds)
    flops = {}
    for name in NAMES:
        with FlopCounterMode(display=False) as counter:
            engines[name].step()
        flops[name] = counter.get_total_flops()
    first, second = (engines[name].values() for name in NAMES)
    return {
        "numel": sum(value.numel() for value in first),
        "times": times,
        "flops": flops,
        "held": {name: engines[name].held_numel for name in NAMES},
        "equal": all(map(torch.equal, first, second)),
    }


def _model(config: Config) -> nn.Module:
    torch.manual_seed(0)
    return Transformer(config.width, config.layers, 8, 16)


def _gradients(model: nn.Module, config: Config) -> dict[str, torch.Tensor]:
    """One whole gradient for each matrix of the blocks, by name."""
    draw = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(parameter.shape, generator=draw)
        for name, parameter in _model(config).named_parameters()
        if parameter.ndim == 2 and name.startswith("blocks.")
    }


def _layerzero(config: Config) -> Engine:
    from layerzero.optim import WholeTensorOptimizer

    model = ENGINES["layerzero"](_model(config), TransformerBlock)
    gradients = _gradients(model, config)
    sharded = {name: p for name, p in model.named_parameters() if name in gradients}
    optimizer = WholeTensorOptimizer(sharded.values(), Muon, lr=LR)
    for name, parameter in sharded.items():
        part = slice(*parameter.layerzero.range)
        parameter.grad = gradients[name].view(-1)[part].clone()

    def values() -> list[torch.Tensor]:
        with model.summon_full_params(writeback=False):
            full = dict(model.named_parameters())
            return [full[name].detach().clone() for name in gradients]

    return Engine(optimizer.step, sum(p.numel() for p in optimizer.owned.values()), values)


def _fully_shard(config: Config) -> Engine:
    model = ENGINES["fully_shard"](_model(config), TransformerBlock)
    gradients = _gradients(model, config)
    sharded = {name: p for name, p in model.named_parameters() if name in gradients}
    for name, parameter in sharded.items():
        rows = gradients[name].chunk(dist.get_world_size())[dist.get_rank()]
        parameter.grad = DTensor.from_local(
            rows.clone(),
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    whole = [nn.Parameter(parameter.full_tensor().detach()) for parameter in sharded.values()]
    optimizer = Muon(whole, lr=LR)

    @torch.no_grad()
    def step() -> None:
        for full, parameter in zip(whole, sharded.values(), strict=True):
            full.grad = parameter.grad.full_tensor()
        optimizer.step()
        for full, parameter in zip(whole, sharded.values(), strict=True):
            own = full.chunk(dist.get_world_size())[dist.get_rank()]
            parameter.to_local().copy_(own)
            full.grad = None

    def values() -> list[torch.Tensor]:
        return [parameter.full_tensor().detach() for parameter in sharded.values()]

    return Engine(step, sum(full.numel() for full in whole), values)


MAKERS: dict[str, Callable[[Config], Engine]] = {
    "fully_shard": _fully_shard,
    "layerzero": _layerzero,
}


def _summary(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    times = ranks[0]["times"]
    return {
        "num_parameters": ranks[0]["numel"],
        "step_ms": {name: Spread.of(times[name]).as_dict() for name in NAMES},
        "gflop": {name: max(rank["flops"][name] for rank in ranks) / 1e9 for name in NAMES},
        "held_numel": {name: max(rank["held"][name] for rank in ranks) for name in NAMES},
        "step_vs_fully_shard": ratio(times["layerzero"], times["fully_shard"]).as_dict(),
        "values_equal": all(rank["equal"] for rank in ranks),
    }


def _show(world_size: int, result: dict[str, Any]) -> None:
    total = result["num_parameters"] / 1e6
    print(f"{world_size} ranks, {total:.1f} M parameters in matrices; median (quartiles)")
    print_table(
        ["engine", "step ms", "Gflop a rank", "whole elements a rank, M"],
        [
            [
                name,
                Spread(**result["step_ms"][name]).text(0),
                f"{result['gflop'][name]:.1f}",
                f"{result['held_numel'][name] / 1e6:.2f}",
            ]
            for name in NAMES
        ],
    )
    print(f"step_vs_fully_shard: {Spread(**result['step_vs_fully_shard']).text()}")
    print(f"the same values afterwards: {result['values_equal']}\n")


if __name__ == "__main__":
    main()
