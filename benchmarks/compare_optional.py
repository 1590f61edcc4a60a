"""What does each engine do when one rank's batch has no image?

A text model whose vision tower runs only on ranks that have an image: both ranks in steps 0 and 1,
then one of them at a time, then neither. Each engine trains it on two ranks, unchanged; ranks that
take no step for `--limit` seconds are ended. Beside it, one process trains on the batches of both.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from common import environment, loopback, print_json, print_table
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from watched_ranks import Watched, compared, named, plural_s, run

WIDTH = 64
HAS_IMAGE = ((True, True), (True, True), (True, False), (False, True), (False, False), (True, True))
"""[step][rank]"""


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Tower(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(hidden), Block(hidden))

    def forward(self, image: Tensor) -> Tensor:
        return self.blocks(image)  # type: ignore[no-any-return]


class TextAndVision(nn.Module):
    def __init__(self, tower_hidden: int) -> None:
        super().__init__()
        self.vision_tower = Tower(tower_hidden)
        self.text = nn.Sequential(Block(128), Block(128))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, text: Tensor, image: Tensor | None) -> Tensor:
        if image is not None:
            text = text + self.vision_tower(image)
        return self.head(self.text(text)).square().mean()  # type: ignore[no-any-return]


def batch(step: int, rank: int) -> tuple[Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    text, image = torch.randn(2, 4, WIDTH, generator=generator)
    return text, image if HAS_IMAGE[step][rank] else None


# Engines ------------------------------------------------------------------------------------------


def _layerzero(model: TextAndVision) -> nn.Module:
    from layerzero import ZeRO3

    return ZeRO3(model, auto_wrap_policy={Block}, optional_modules=[model.vision_tower])


def _layerzero_without(model: TextAndVision) -> nn.Module:
    from layerzero import ZeRO3

    return ZeRO3(model, auto_wrap_policy={Block})


def _fully_shard(model: TextAndVision) -> nn.Module:
    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module)
    return fully_shard(model)


ENGINES: dict[str, Callable[[TextAndVision], nn.Module]] = {
    "ZeRO3, optional_modules": _layerzero,
    "ZeRO3 without": _layerzero_without,
    "fully_shard": _fully_shard,
    "DDP": DistributedDataParallel,
    "DDP, find_unused_parameters": lambda model: DistributedDataParallel(
        model, find_unused_parameters=True
    ),
}
TOWERS = {"another size": 96, "the same size": 128}
"""Width inside the tower's blocks; those of the text have 128."""


def train(engine: str, tower: str, rank: int) -> None:
    """One rank: a line of JSON after each step."""
    torch.manual_seed(0)
    model = ENGINES[engine](TextAndVision(TOWERS[tower]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for step in range(len(HAS_IMAGE)):
        optimizer.zero_grad()
        loss = model(*batch(step, rank))
        loss.backward()
        optimizer.step()
        print(json.dumps(loss.item()), flush=True)


def train_single(tower: str) -> list[list[float]]:
    """One process on the batches of both ranks; its losses [rank][step]."""
    torch.manual_seed(0)
    model = TextAndVision(TOWERS[tower])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    losses: list[list[float]] = [[], []]
    for step in range(len(HAS_IMAGE)):
        optimizer.zero_grad()
        each = [model(*batch(step, rank)) for rank in range(2)]
        (sum(each) / 2).backward()
        optimizer.step()
        for own, loss in zip(losses, each, strict=True):
            own.append(loss.item())
    return losses


# What happens -------------------------------------------------------------------------------------


def verdict(result: Watched, single: list[list[float]]) -> str:
    """One line; steps count from 0."""
    losses = [[json.loads(line) for line in lines] for lines in result.lines]
    step = min(map(len, losses))
    hung = named(result.hung)
    failed = named(map(bool, result.errors))
    if hung:
        return f"{hung} hang{plural_s(hung)} in step {step}" + (
            f", {failed} failed" if failed else ""
        )
    if failed:
        return f"{failed} fail{plural_s(failed)} in step {step}"
    return compared(losses, single)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--limit", type=float, default=20.0, help="seconds without a step")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--rank", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        _main_of_rank(*args.rank)
        return
    results: dict[str, dict[str, str]] = {}
    rows = []
    for tower in TOWERS:
        single = train_single(tower)
        for engine in args.engines:
            result = run(__file__, [engine, tower], args.limit)
            results.setdefault(engine, {})[tower] = verdict(result, single)
            rows.append([engine, tower, results[engine][tower]])
            for rank, error in enumerate(result.errors):
                if error:
                    print(f"{engine}, rank {rank}: {error}")
    print()
    print_table(["engine", "units of the tower have", "what happens"], rows)
    print_json(
        {
            "benchmark": "compare_optional",
            "limit_s": args.limit,
            "environment": environment(),
            "engines": results,
        }
    )


def _main_of_rank(rank: str, engine: str, tower: str, store: str) -> None:
    torch.set_num_threads(1)
    with loopback():
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=2)
    train(engine, tower, int(rank))
    # No `destroy_process_group`: where ranks differ, it could wait for what never comes.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
