"""What does layered ZeRO save? Step time, bytes sent and bytes resident.

gloo ranks of this machine, in two shard groups ("nodes") of neighbours, train one transformer with
AdamW on the same data under each engine: every mode of layerzero, `fully_shard` over all ranks and
over a 2-D mesh (HSDP). The engines take turns in each round, so a ratio is within one round; the
slowest rank counts. "zero1/2" has zero3_size=2; "shard" is one hop over all.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from common import (
    SIZES,
    Spread,
    options,
    print_result,
    print_table,
    ratio,
    run_on_ranks,
    spreads,
    take_turns,
)
from engines import (
    LEARNING_RATE,
    TransformerBlock,
    fully_shard,
    layerzero,
    make_transformer,
    random_batches,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from traffic import SentBytes


def main() -> None:
    parser = options(__doc__, size="6m", batch=1, length=64, rounds=7, steps=1)
    parser.add_argument("--world-sizes", type=int, nargs="+", choices=(2, 4), default=[2, 4])
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument(
        "--accumulation",
        choices=("auto", "unsharded", "sharded"),
        default="auto",
        help="where micro-batches of layerzero add up",
    )
    args = parser.parse_args()
    if args.micro_batches < 1:
        parser.error("--micro-batches: expected at least 1")
    load = os.getloadavg()[0]
    print(f"{load:.1f} processes share {os.cpu_count()} cores before the first rank starts\n")
    measured = {}
    for world_size in args.world_sizes:
        ranks = run_on_ranks(world_size, measure, args)
        measured[world_size] = result = _summary(ranks, world_size)
        _show(result, world_size)
    print_result(args, measured=measured, load_before=load)


def _summary(ranks: list[dict[str, Any]], world_size: int) -> dict[str, Any]:
    """Combine the ranks' results: bytes of the rank with the most.

    Times are those of the slowest rank already.
    """
    times, half = ranks[0]["times"], world_size // 2

    def most(key: str) -> dict[str, Any]:
        return {
            name: max((rank[key][name] for rank in ranks), key=lambda parts: sum(parts.values()))
            for name in times
        }

    def against(other: str) -> dict[str, dict[str, float]]:
        return {name: ratio(values, times[other]).as_dict() for name, values in times.items()}

    deterministic = ratio(times[f"zero1/{half} deterministic"], times[f"zero1/{half}"])
    return {
        "step_ms": spreads(times),
        "step_vs_fully_shard": against("fully_shard"),
        "step_vs_hsdp": against("hsdp"),
        "deterministic_vs_zero1": deterministic.as_dict(),
        "sent": most("sent"),
        "resident": most("resident"),
        "last_loss": ranks[0]["last_loss"],
        "parameter_nbytes": ranks[0]["parameter_nbytes"],
    }


def _show(result: dict[str, Any], world_size: int) -> None:
    nbytes = result["parameter_nbytes"]
    print(f"Measured, {world_size} ranks, {_mb(nbytes)} MB of float32 parameters")
    print_table(
        ["engine", "ms a step", "vs fully_shard", "vs hsdp"],
        [
            [
                name,
                Spread(**step).text(0),
                Spread(**result["step_vs_fully_shard"][name]).text(),
                Spread(**result["step_vs_hsdp"][name]).text(),
            ]
            for name, step in result["step_ms"].items()
        ],
    )
    print(f"cost of deterministic: {Spread(**result['deterministic_vs_zero1']).text()}\n")
    kinds = ["parameters", "gradients", "optimizer", "compute shards"]
    print("MB a rank sends in a step, and MB that stay between steps")
    print_table(
        ["engine", "inner", "outer", "all", *kinds, "stays"],
        [
            [
                name,
                *(_mb(sent[axis]) for axis in ("inner", "outer", "all")),
                *(_mb(result["resident"][name][kind]) for kind in kinds),
                _mb(sum(result["resident"][name].values())),
            ]
            for name, sent in result["sent"].items()
        ],
    )
    print()


def _mb(nbytes: float) -> str:
    return f"{nbytes / 1e6:.1f}"


def sharded(args: argparse.Namespace) -> dict[str, Any]:
    """The model under each engine. Shard groups never have all ranks, except for `shard`."""
    world_size = dist.get_world_size()
    half = world_size // 2

    def model() -> nn.Module:
        return make_transformer(SIZES[args.size], args.length)

    def zero(outer: str, size: int, deterministic: bool = False) -> nn.Module:
        options: dict[str, Any] = {
            "zero3_size": size,
            "outer": outer,
            "deterministic": deterministic,
        }
        return layerzero(model(), TransformerBlock, accumulation=args.accumulation, **options)

    engines = {}
    for size in sorted({1, half}):
        engines[f"zero1/{size}"] = zero("zero1", size)
        engines[f"replicate/{size}"] = zero("replicate", size)
    engines[f"zero1/{half} deterministic"] = zero("zero1", half, deterministic=True)
    engines["shard"] = zero("shard", half)
    engines["fully_shard"] = fully_shard(model(), TransformerBlock)
    axes = ("replicate", "shard")
    mesh = init_device_mesh("cpu", (world_size // half, half), mesh_dim_names=axes)
    engines["hsdp"] = fully_shard(model(), TransformerBlock, mesh=mesh)
    return engines


class Trainer:
    """One engine's model, its optimizer and this rank's data."""

    def __init__(self, model: nn.Module, args: argparse.Namespace) -> None:
        self.model: Any = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        self._next_batch = random_batches(args.batch, args.length)
        self._micro_batches = args.micro_batches
        self.loss = 0.0

    def step(self) -> None:
        """Train on the next micro-batches. Gradients stay until the next step."""
        self.optimizer.zero_grad()
        for left in reversed(range(self._micro_batches)):
            self.model.set_requires_gradient_sync(left == 0)
            loss = self.model(self._next_batch())
            (loss / self._micro_batches).backward()
        self.optimizer.step()
        self.loss = loss.item()

    def resident_nbytes(self) -> dict[str, int]:
        """Bytes of storage on this rank between steps, by content."""
        parameters = list(self.model.parameters())
        states = [
            value
            for state in self.optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor) and value.dim() > 0
        ]
        seen: set[int] = set()
        return {
            "parameters": _new_nbytes(parameters, seen),
            "gradients": _new_nbytes([p.grad for p in parameters if p.grad is not None], seen),
            "optimizer": _new_nbytes(states, seen),
            "compute shards": _new_nbytes(_compute_shards(self.model), seen),
        }

    def sent_nbytes(self) -> dict[str, float]:
        """Bytes that this rank sends in a step: over all ranks, inside and between shard groups."""
        world_size = dist.get_world_size()
        sent = {"inner": 0.0, "outer": 0.0, "all": 0.0}
        with SentBytes() as traffic:
            self.step()
            dist.barrier()
        for ranks, nbytes in traffic.by_group.items():
            nodes = {rank // (world_size // 2) for rank in ranks}
            axis = "all" if len(ranks) == world_size else "inner" if len(nodes) == 1 else "outer"
            sent[axis] += nbytes
        return sent


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run on each rank: train, and measure."""
    trainers = {name: Trainer(model, args) for name, model in sharded(args).items()}
    steps = {name: trainer.step for name, trainer in trainers.items()}
    times = take_turns(steps, args.rounds, args.steps)
    parameters = make_transformer(SIZES[args.size], args.length).parameters()
    return {
        "times": times,
        "last_loss": {name: trainer.loss for name, trainer in trainers.items()},
        "sent": {name: trainer.sent_nbytes() for name, trainer in trainers.items()},
        "resident": {name: trainer.resident_nbytes() for name, trainer in trainers.items()},
        "parameter_nbytes": sum(parameter.nbytes for parameter in parameters),
    }


def _compute_shards(model: nn.Module) -> list[Tensor]:
    from layerzero import ZeRO3
    from layerzero.wrapping.units import ordered_units

    if not isinstance(model, ZeRO3):
        return []
    return [handle.compute_shard for unit in ordered_units(model) for handle in unit.handles]


def _new_nbytes(tensors: Sequence[Any], seen: set[int]) -> int:
    """Bytes of the storages that are not in `seen`, to which they are added."""
    total = 0
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        storage = local.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total


if __name__ == "__main__":
    main()
