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
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from common import (
    Spread,
    options,
    print_result,
    print_table,
    ratio,
    run_on_ranks,
    spreads,
    take_turns,
)
from engines import TransformerBlock, fully_shard, layerzero, make_transformer
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Muon
from torch.utils.flop_counter import FlopCounterMode

LR = 0.02


@dataclass
class Engine:
    step: Callable[[], None]
    held_numel: int
    """Elements of whole matrices that this rank keeps."""
    values: Callable[[], list[torch.Tensor]]
    """Full values of the matrices. Collective."""


def main() -> None:
    defaults = {"width": 384, "layers": 6, "world_sizes": [2, 4], "rounds": 7, "steps": 2}
    args = options(__doc__, **defaults).parse_args()
    results = {}
    for world_size in args.world_sizes:
        results[world_size] = _summary(run_on_ranks(world_size, measure, args))
        _show(world_size, results[world_size])
    print_result(args, ranks=results)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run on each rank: step times (slowest rank), products and elements of each engine."""
    warnings.filterwarnings("ignore")
    made = make_transformer((args.width, args.layers), 16).named_parameters()
    draw = torch.Generator().manual_seed(1)
    gradients = {
        name: torch.randn(parameter.shape, generator=draw)
        for name, parameter in made
        if parameter.ndim == 2 and name.startswith("blocks.")
    }
    engines = {
        name: make(make_transformer((args.width, args.layers), 16), gradients)
        for name, make in (("fully_shard", _fully_shard), ("layerzero", _layerzero))
    }
    steps = {name: engine.step for name, engine in engines.items()}
    times = take_turns(steps, args.rounds, args.steps).elapsed
    flops = {}
    for name, step in steps.items():
        with FlopCounterMode(display=False) as counter:
            step()
        flops[name] = counter.get_total_flops()
    first, second = (engine.values() for engine in engines.values())
    return {
        "numel": sum(value.numel() for value in first),
        "times": times,
        "flops": flops,
        "held": {name: engine.held_numel for name, engine in engines.items()},
        "equal": all(map(torch.equal, first, second)),
    }


def _layerzero(module: nn.Module, gradients: dict[str, torch.Tensor]) -> Engine:
    from layerzero.optim import WholeTensorOptimizer

    model: Any = layerzero(module, TransformerBlock)
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


def _fully_shard(module: nn.Module, gradients: dict[str, torch.Tensor]) -> Engine:
    model = fully_shard(module, TransformerBlock)
    sharded: dict[str, Any] = {n: p for n, p in model.named_parameters() if n in gradients}

    def rows(whole: torch.Tensor) -> torch.Tensor:
        return whole.chunk(dist.get_world_size())[dist.get_rank()]

    for name, parameter in sharded.items():
        parameter.grad = DTensor.from_local(
            rows(gradients[name]).clone(),
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
            parameter.to_local().copy_(rows(full))
            full.grad = None

    def values() -> list[torch.Tensor]:
        return [parameter.full_tensor().detach() for parameter in sharded.values()]

    return Engine(step, sum(full.numel() for full in whole), values)


def _summary(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    times = ranks[0]["times"]
    return {
        "num_parameters": ranks[0]["numel"],
        "step_ms": spreads(times),
        "gflop": {name: max(rank["flops"][name] for rank in ranks) / 1e9 for name in times},
        "held_numel": {name: max(rank["held"][name] for rank in ranks) for name in times},
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
                Spread(**step).text(0),
                f"{result['gflop'][name]:.1f}",
                f"{result['held_numel'][name] / 1e6:.2f}",
            ]
            for name, step in result["step_ms"].items()
        ],
    )
    print(f"step_vs_fully_shard: {Spread(**result['step_vs_fully_shard']).text()}")
    print(f"the same values afterwards: {result['values_equal']}\n")


if __name__ == "__main__":
    main()
