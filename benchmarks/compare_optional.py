"""What does each engine do when one rank's batch has no image?

A text model whose vision tower runs only on ranks that have an image: both ranks in steps 0 and 1,
then one of them at a time, then neither. Each engine trains it on two ranks, unchanged; ranks that
take no step for `--limit` seconds are ended. Beside it, one process trains on the batches of both.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import environment, loopback, print_json, print_table
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

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
START_LIMIT_S = 120.0
"""Until the first step is done: imports take long on a busy machine."""


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


# Ranks --------------------------------------------------------------------------------------------


def run(engine: str, tower: str, limit_s: float) -> dict[str, Any]:
    """Two ranks, ended after the limit; what became of them."""
    with tempfile.TemporaryDirectory(prefix="compare-") as folder:
        files = [Path(folder, f"{rank}.{kind}") for rank in range(2) for kind in ("out", "err")]
        ranks = []
        for rank in range(2):
            own = [sys.executable, __file__, "--rank", str(rank), engine, tower, f"{folder}/store"]
            with files[2 * rank].open("w") as out, files[2 * rank + 1].open("w") as err:
                ranks.append(subprocess.Popen(own, stdout=out, stderr=err))
        try:
            hung = _wait(ranks, files[::2], limit_s)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        texts = [file.read_text() for file in files]
    losses = [[json.loads(line) for line in text.splitlines()] for text in texts[::2]]
    errors = [
        "" if is_hung else _error(process.returncode, text)
        for process, is_hung, text in zip(ranks, hung, texts[1::2], strict=True)
    ]
    return {"losses": losses, "hung": hung, "errors": errors}


def _wait(ranks: list[subprocess.Popen[bytes]], outputs: list[Path], limit_s: float) -> list[bool]:
    """Which of the ranks still run when none has written anything for so long."""
    size, deadline = 0, time.monotonic() + START_LIMIT_S
    while any(process.poll() is None for process in ranks) and time.monotonic() < deadline:
        time.sleep(0.1)
        written = sum(output.stat().st_size for output in outputs)
        if written > size:
            size, deadline = written, time.monotonic() + limit_s
    return [process.poll() is None for process in ranks]


def _error(code: int | None, text: str) -> str:
    """How a rank ended; "" if well."""
    if not code:
        return ""
    lines = [line for line in text.splitlines() if line and line[0] != " " and "Error" in line]
    ended = f"died of {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return lines[-1].partition("]: ")[2][:160] if lines else ended


def verdict(result: dict[str, Any], single: list[list[float]]) -> str:
    """One line; steps count from 0."""
    step = min(map(len, result["losses"]))
    hung = _ranks(result["hung"])
    failed = _ranks(map(bool, result["errors"]))
    if hung:
        return f"{hung} hang{_s(hung)} in step {step}" + (f", {failed} failed" if failed else "")
    if failed:
        return f"{failed} fail{_s(failed)} in step {step}"
    pairs = [
        (a, b)
        for own, other in zip(result["losses"], single, strict=True)
        for a, b in zip(own, other, strict=True)
    ]
    if all(abs(a - b) < 1e-5 * abs(b) for a, b in pairs):
        return "trains, with the losses of one process"
    return f"trains, with OTHER LOSSES than one process: {pairs}"


def _ranks(chosen: Iterable[bool]) -> str:
    ranks = [str(rank) for rank, is_chosen in enumerate(chosen) if is_chosen]
    return "both ranks" if len(ranks) == 2 else "".join(f"rank {rank}" for rank in ranks)


def _s(subject: str) -> str:
    return "" if subject == "both ranks" else "s"


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
            result = run(engine, tower, args.limit)
            results.setdefault(engine, {})[tower] = verdict(result, single)
            rows.append([engine, tower, results[engine][tower]])
            for rank, error in enumerate(result["errors"]):
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
