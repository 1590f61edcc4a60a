"""What does layered ZeRO save? Step time, bytes sent and bytes resident.

gloo ranks of this machine, in two shard groups ("nodes") of neighbours, train one transformer with
AdamW on the same data under each engine: every mode of layerzero, `fully_shard` over all ranks and
over a 2-D mesh (HSDP). The engines take turns in each round, so a ratio is within one round; the
slowest rank counts. "zero1/2" has zero3_size=2; "shard" is one hop over all.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from bench_step import SIZES
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
from engines import Transformer, TransformerBlock, fully_shard
from torch import Tensor, nn
from traffic import SentBytes

HEADS = 8


def main() -> None:
    args = _parse()
    width, layers = SIZES[args.size]
    config = Config(
        width=width,
        layers=layers,
        batch=args.batch,
        length=args.length,
        rounds=args.rounds,
        steps=args.steps,
        micro_batches=args.micro_batches,
        accumulation=args.accumulation,
    )
    load = os.getloadavg()[0]
    print(f"{load:.1f} processes share {os.cpu_count()} cores before the first rank starts\n")
    measured = {}
    for world_size in args.world_sizes:
        ranks = run_on_ranks(world_size, measure, config)
        measured[world_size] = result = _summary(ranks, world_size)
        _show_measured(result, world_size)
    print_json(
        {
            "benchmark": "layered",
            "measured": measured,
            "load_before": load,
            "config": vars(args) | asdict(config),
            "environment": environment(),
        }
    )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--world-sizes", type=int, nargs="+", choices=(2, 4), default=[2, 4])
    parser.add_argument("--size", choices=SIZES, default="6m")
    parser.add_argument("--batch", type=int, default=1, help="sequences a rank")
    parser.add_argument("--length", type=int, default=64, help="bytes in a sequence")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=1, help="of each engine in a round")
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
    return args


# Shown ----------------------------------------------------------------------------------------


def _summary(ranks: list[dict[str, Any]], world_size: int) -> dict[str, Any]:
    """Combine the ranks' results: bytes of the rank with the most.

    Times are those of the slowest rank already.
    """
    first = ranks[0]
    times = first["times"]
    half = world_size // 2

    def most(key: str) -> dict[str, Any]:
        return {
            name: max((rank[key][name] for rank in ranks), key=lambda parts: sum(parts.values()))
            for name in times
        }

    deterministic = ratio(times[f"zero1/{half} deterministic"], times[f"zero1/{half}"])
    return {
        "step_ms": {name: Spread.of(values).as_dict() for name, values in times.items()},
        "step_vs_fully_shard": _against(times, "fully_shard"),
        "step_vs_hsdp": _against(times, "hsdp"),
        "deterministic_vs_zero1": deterministic.as_dict(),
        "sent": most("sent"),
        "resident": most("resident"),
        "last_loss": {name: values[-1] for name, values in first["losses"].items()},
        "parameter_nbytes": first["parameter_nbytes"],
    }


def _against(times: dict[str, list[float]], other: str) -> dict[str, dict[str, float]]:
    return {name: ratio(values, times[other]).as_dict() for name, values in times.items()}


def _show_measured(result: dict[str, Any], world_size: int) -> None:
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
                _mb(_total(result["resident"][name])),
            ]
            for name, sent in result["sent"].items()
        ],
    )
    print()


def _total(parts: dict[str, float]) -> float:
    return sum(parts.values())


def _mb(nbytes: float) -> str:
    return f"{nbytes / 1e6:.1f}"


# On each rank ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Config:
    width: int
    layers: int
    batch: int
    length: int
    rounds: int
    steps: int
    micro_batches: int
    accumulation: str


@dataclass(frozen=True)
class Engine:
    make: Callable[[nn.Module], nn.Module]


def engines_of(world_size: int, accumulation: str) -> dict[str, Engine]:
    """The engines to measure on `world_size` ranks.

    Shard groups never have all ranks, except for `shard`.
    """
    half = world_size // 2

    def zero(outer: str, zero3_size: int, deterministic: bool = False) -> Engine:
        options = {
            "zero3_size": zero3_size,
            "outer": outer,
            "deterministic": deterministic,
            "accumulation": accumulation,
        }
        return Engine(partial(shard_with_layerzero, **options))

    engines = {}
    for zero3_size in sorted({1, half}):
        engines[f"zero1/{zero3_size}"] = zero("zero1", zero3_size)
        engines[f"replicate/{zero3_size}"] = zero("replicate", zero3_size)
    engines[f"zero1/{half} deterministic"] = zero("zero1", half, deterministic=True)
    engines["shard"] = zero("shard", half)
    engines["fully_shard"] = Engine(partial(fully_shard, unit=TransformerBlock))
    engines["hsdp"] = Engine(partial(_hsdp, zero3_size=half))
    return engines


def shard_with_layerzero(model: nn.Module, **options: Any) -> nn.Module:
    from layerzero import ZeRO3

    return ZeRO3(model, auto_wrap_policy={TransformerBlock}, **options)


def _hsdp(model: nn.Module, zero3_size: int) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard as shard

    shape = (dist.get_world_size() // zero3_size, zero3_size)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    for module in model.modules():
        if isinstance(module, TransformerBlock):
            shard(module, mesh=mesh)
    shard(model, mesh=mesh)  # in place
    return model


class Trainer:
    """One engine's model, its optimizer and this rank's data."""

    def __init__(self, engine: Engine, config: Config) -> None:
        self.model: Any = engine.make(build(config))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4)
        self._data = Batches(config)
        self._micro_batches = config.micro_batches

    def step(self) -> float:
        """Train on the next micro-batches; returns the last loss.

        Gradients stay until the next step.
        """
        self.optimizer.zero_grad()
        for left in reversed(range(self._micro_batches)):
            self.model.set_requires_gradient_sync(left == 0)
            loss = self.model(self._data.next())
            (loss / self._micro_batches).backward()
        self.optimizer.step()
        return loss.item()

    def resident_nbytes(self) -> dict[str, int]:
        """Bytes of storage on this rank between steps, by content."""
        parameters = [_local(p) for p in self.model.parameters()]
        gradients = [_local(p.grad) for p in self.model.parameters() if p.grad is not None]
        states = [
            _local(value)
            for state in self.optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor) and value.dim() > 0
        ]
        seen: set[int] = set()
        return {
            "parameters": _new_nbytes(parameters, seen),
            "gradients": _new_nbytes(gradients, seen),
            "optimizer": _new_nbytes(states, seen),
            "compute shards": _new_nbytes(_compute_shards(self.model), seen),
        }


class Batches:
    """This rank's data, the same for every engine."""

    def __init__(self, config: Config) -> None:
        self._shape = (config.batch, config.length + 1)
        self._generator = torch.Generator().manual_seed(1 + dist.get_rank())

    def next(self) -> Tensor:
        return torch.randint(256, self._shape, generator=self._generator)


def build(config: Config) -> Transformer:
    torch.manual_seed(0)
    return Transformer(config.width, config.layers, HEADS, config.length)


def measure(config: Config) -> dict[str, Any]:
    """Run on each rank: train, and measure."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    engines = engines_of(dist.get_world_size(), config.accumulation)
    trainers = {name: Trainer(engine, config) for name, engine in engines.items()}
    losses: dict[str, list[float]] = {name: [] for name in engines}

    def step_ms(name: str) -> float:
        gc.collect()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(config.steps):
            losses[name].append(trainers[name].step())
        return max_over_ranks((time.perf_counter() - start) / config.steps * 1e3)

    times = interleave(list(engines), step_ms, config.rounds)
    return {
        "times": times,
        "losses": losses,
        "sent": {name: sent_nbytes(trainer) for name, trainer in trainers.items()},
        "resident": {name: trainer.resident_nbytes() for name, trainer in trainers.items()},
        "parameter_nbytes": sum(parameter.nbytes for parameter in build(config).parameters()),
    }


def sent_nbytes(trainer: Trainer) -> dict[str, float]:
    """Bytes that this rank sends in a step: over all ranks, inside and between shard groups."""
    world_size = dist.get_world_size()
    sent = {"inner": 0.0, "outer": 0.0, "all": 0.0}
    with SentBytes() as traffic:
        trainer.step()
        dist.barrier()
    for ranks, nbytes in traffic.by_group.items():
        nodes = {rank // (world_size // 2) for rank in ranks}
        axis = "all" if len(ranks) == world_size else "inner" if len(nodes) == 1 else "outer"
        sent[axis] += nbytes
    return sent


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _compute_shards(model: nn.Module) -> list[Tensor]:
    from layerzero import ZeRO3
    from layerzero.step.root import ordered_units

    if not isinstance(model, ZeRO3):
        return []
    return [handle.compute_shard for unit in ordered_units(model) for handle in unit.handles]


def _new_nbytes(tensors: Sequence[Tensor], seen: set[int]) -> int:
    """Bytes of the storages that are not in `seen`, to which they are added."""
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total


if __name__ == "__main__":
    main()
