"""What does each engine do when one rank has fewer batches?

The same loop on two ranks: the first has five batches, the second three. The second then waits for
the first, as a program does that goes on to save a checkpoint. Ranks that write nothing for
`--limit` seconds are ended. Beside it, one process trains on the batches of both.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from common import environment, loopback, print_json, print_table
from compare_optional import Block
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from watched_ranks import Watched, compared, run

WIDTH = 64
COUNTS = (5, 3)
"""Batches of each rank."""
DONE = "done"
"""A rank's last line."""

Context = Callable[[nn.Module, torch.optim.Optimizer], AbstractContextManager[Any]]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(128), Block(128))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x)).square().mean()  # type: ignore[no-any-return]


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


# Engines ------------------------------------------------------------------------------------------


def _layerzero(model: nn.Module) -> nn.Module:
    from layerzero import ZeRO3

    return ZeRO3(model, auto_wrap_policy={Block})


def _fully_shard(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module)
    return fully_shard(model)


def _layerzeros_join(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    import layerzero

    return layerzero.join(model, optimizer)


def _no_context(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return nullcontext()


ENGINES: dict[str, tuple[Callable[[nn.Module], nn.Module], Context]] = {
    "ZeRO3, layerzero.join": (_layerzero, _layerzeros_join),
    "ZeRO3, torch's Join": (_layerzero, lambda m, o: Join([m], optimizers=[o])),  # type: ignore[list-item]
    "ZeRO3": (_layerzero, _no_context),
    "fully_shard": (_fully_shard, _no_context),
    "fully_shard, torch's Join": (_fully_shard, lambda m, o: Join([m])),  # type: ignore[list-item]
    "DDP": (DistributedDataParallel, _no_context),
    "DDP, torch's Join": (DistributedDataParallel, lambda m, o: Join([m])),  # type: ignore[list-item]
}


def train(engine: str, rank: int) -> None:
    """One rank: a line of JSON after each step."""
    torch.manual_seed(0)
    make, context = ENGINES[engine]
    model = make(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    with context(model, optimizer):
        for step in range(COUNTS[rank]):
            optimizer.zero_grad()
            loss = model(batch(step, rank))
            loss.backward()
            optimizer.step()
            print(json.dumps(loss.item()), flush=True)


def train_single() -> list[list[float]]:
    """One process on the batches of both ranks; its losses [rank][step]."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    losses: list[list[float]] = [[], []]
    for step in range(max(COUNTS)):
        optimizer.zero_grad()
        for rank, count in enumerate(COUNTS):
            if step < count:
                loss = model(batch(step, rank))
                (loss / len(COUNTS)).backward()
                losses[rank].append(loss.item())
        optimizer.step()
    return losses


# What happens -------------------------------------------------------------------------------------


def verdict(result: Watched, single: list[list[float]]) -> str:
    """One line; steps count from 0."""
    losses = [[json.loads(line) for line in lines if line != DONE] for lines in result.lines]
    found = []
    for rank, (own, is_hung, error) in enumerate(
        zip(losses, result.hung, result.errors, strict=True)
    ):
        step = f" in step {len(own)}" if len(own) < COUNTS[rank] else " after its last step"
        is_done = result.lines[rank][-1:] == [DONE]
        if error or (is_hung and not is_done):
            found.append(f"rank {rank} {'fails' if error else 'hangs'}{step}")
    if found:
        return ", ".join(found)
    return compared(losses, single)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--limit", type=float, default=20.0, help="seconds without a step")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        _main_of_rank(*args.rank)
        return
    results: dict[str, str] = {}
    single = train_single()
    for engine in args.engines:
        result = run(__file__, [engine], args.limit)
        results[engine] = verdict(result, single)
        for rank, error in enumerate(result.errors):
            if error:
                print(f"{engine}, rank {rank}: {error}")
    print()
    print_table(["engine", "what happens"], [list(row) for row in results.items()])
    print_json(
        {
            "benchmark": "compare_join",
            "limit_s": args.limit,
            "environment": environment(),
            "engines": results,
        }
    )


def _main_of_rank(rank: str, engine: str, store: str) -> None:
    torch.set_num_threads(1)
    with loopback():
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=2)
    ends = dist.FileStore(f"{store}.ends", 2)
    train(engine, int(rank))
    print(DONE, flush=True)
    ends.set(rank, "")
    ends.wait(["0", "1"], timedelta(hours=1))
    # No `destroy_process_group`: where ranks differ, it could wait for what never comes.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
