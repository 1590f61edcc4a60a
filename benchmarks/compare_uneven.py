"""What does each engine do when ranks differ: in their batches, or in the modules they run?

    batches    rank 0 has five batches, rank 1 three; it then waits for rank 0, as a program does
               that goes on to save a checkpoint
    image      a text model whose vision tower runs only on ranks that have an image: both ranks in
               steps 0 and 1, then one of them at a time, then neither. The units of its tower have
               another size than the text's
    same size  the same, with units of equal sizes

The same loop runs unchanged on two ranks under each engine. Ranks that write nothing for `--limit`
seconds are ended. Beside it, one process trains on the batches of both.
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
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from common import options, print_result, print_table, use_loopback
from engines import fully_shard, layerzero
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

WIDTH = 64
START_LIMIT_S = 120.0
"""Until the first line is written: imports take long on a busy machine."""
DONE = "done"
"""A rank's last line; before it, a line of JSON for each step."""


class Block(nn.Module):
    def __init__(self, hidden: int = 128) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """Takes a text and, if it has a tower, an image."""

    def __init__(self, tower: int | None = None) -> None:
        super().__init__()
        self.vision_tower = nn.Sequential(Block(tower), Block(tower)) if tower else None
        self.text = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, text: Tensor, image: Tensor | None = None) -> Tensor:
        if self.vision_tower is not None and image is not None:
            text = text + self.vision_tower(image)
        loss: Tensor = self.head(self.text(text)).square().mean()
        return loss


Context = Callable[[nn.Module, torch.optim.Optimizer], Any]


def _layerzeros_join(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    import layerzero as package

    return package.join(model, optimizer)


def _torchs_join(model: Any, optimizer: Any) -> Any:
    return Join([model], optimizers=[optimizer] if hasattr(model, "clip_grad_norm_") else [])


def _zero3(model: nn.Module, **arguments: Any) -> nn.Module:
    return layerzero(model, Block, **arguments)


def _shard(model: nn.Module) -> nn.Module:
    return fully_shard(model, Block)


BATCHES: dict[str, tuple[Callable[[Any], nn.Module], Context | None]] = {
    "ZeRO3, layerzero.join": (_zero3, _layerzeros_join),
    "ZeRO3, torch's Join": (_zero3, _torchs_join),
    "ZeRO3": (_zero3, None),
    "fully_shard": (_shard, None),
    "fully_shard, torch's Join": (_shard, _torchs_join),
    "DDP": (DistributedDataParallel, None),
    "DDP, torch's Join": (DistributedDataParallel, _torchs_join),
}
MODULES: dict[str, tuple[Callable[[Any], nn.Module], Context | None]] = {
    "ZeRO3, optional_modules": (lambda m: _zero3(m, optional_modules=[m.vision_tower]), None),
    "ZeRO3 without": (_zero3, None),
    "fully_shard": (_shard, None),
    "DDP": (DistributedDataParallel, None),
    "DDP, find_unused_parameters": (
        lambda m: DistributedDataParallel(m, find_unused_parameters=True),
        None,
    ),
}


class Case(NamedTuple):
    tower: int | None
    has: Sequence[tuple[bool, bool]]
    """[step][rank]: whether the rank has an image; without a tower, a batch."""
    engines: dict[str, tuple[Callable[[Any], nn.Module], Context | None]]

    def inputs(self, step: int, rank: int) -> tuple[Tensor, ...] | None:
        generator = torch.Generator().manual_seed(100 * step + rank)
        text, image = torch.randn(2, 4, WIDTH, generator=generator)
        if self.has[step][rank]:
            return (text, image) if self.tower else (text,)
        return (text,) if self.tower else None

    def parts(self) -> tuple[nn.Module, Callable[[Any], torch.optim.Optimizer]]:
        torch.manual_seed(0)
        return Model(self.tower), lambda model: torch.optim.SGD(
            model.parameters(), lr=0.01, momentum=0.9
        )


IMAGES = ((True, True),) * 2 + ((True, False), (False, True), (False, False), (True, True))
CASES = {
    "batches": Case(None, ((True, True),) * 3 + ((True, False),) * 2, BATCHES),
    "image": Case(96, IMAGES, MODULES),
    "same size": Case(128, IMAGES, MODULES),
}


def train(case: Case, engine: str, rank: int) -> None:
    """One rank."""
    make, context = case.engines[engine]
    module, make_optimizer = case.parts()
    model = make(module)
    optimizer = make_optimizer(model)
    with nullcontext() if context is None else context(model, optimizer):
        for step in range(len(case.has)):
            if (inputs := case.inputs(step, rank)) is not None:
                optimizer.zero_grad()
                loss = model(*inputs)
                loss.backward()
                optimizer.step()
                print(json.dumps(loss.item()), flush=True)


def train_single(case: Case) -> list[list[float]]:
    """One process on the batches of both ranks; its losses [rank][step]."""
    model, make_optimizer = case.parts()
    optimizer = make_optimizer(model)
    losses: list[list[float]] = [[], []]
    for step in range(len(case.has)):
        optimizer.zero_grad()
        for rank in range(2):
            if (inputs := case.inputs(step, rank)) is not None:
                loss = model(*inputs)
                (loss / 2).backward()
                losses[rank].append(loss.item())
        optimizer.step()
    return losses


def _main_of_rank(rank: str, case: str, engine: str, store: str) -> None:
    torch.set_num_threads(1)
    use_loopback()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=2)
    ends = dist.FileStore(f"{store}.ends", 2)
    train(CASES[case], engine, int(rank))
    print(DONE, flush=True)
    ends.set(rank, "")
    ends.wait(["0", "1"], timedelta(hours=1))
    # No `destroy_process_group`: where ranks differ, it could wait for what never comes.
    os._exit(0)


def run(arguments: Sequence[str], limit_s: float) -> list[tuple[list[str], str]]:
    """What each of two ranks has written, and how it ended: "", "hangs", or its error.

    Args:
        limit_s: seconds without a line of any rank, after which all are ended.
    """
    with tempfile.TemporaryDirectory(prefix="compare-") as folder:
        files = [(Path(folder, f"{rank}.out"), Path(folder, f"{rank}.err")) for rank in range(2)]
        ranks = []
        for rank, (out, err) in enumerate(files):
            own = [sys.executable, __file__, "--measure", str(rank), *arguments, f"{folder}/store"]
            ranks.append(subprocess.Popen(own, stdout=out.open("w"), stderr=err.open("w")))
        try:
            size, deadline = 0, time.monotonic() + START_LIMIT_S
            while any(each.poll() is None for each in ranks) and time.monotonic() < deadline:
                time.sleep(0.1)
                written = sum(out.stat().st_size for out, _ in files)
                if written > size:
                    size, deadline = written, time.monotonic() + limit_s
            hung = [each.poll() is None for each in ranks]
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        return [
            (out.read_text().splitlines(), "hangs" if hangs else _error(code, err.read_text()))
            for (out, err), hangs, code in zip(
                files, hung, [process.returncode for process in ranks], strict=True
            )
        ]


def _error(code: int, text: str) -> str:
    """How a rank ended; "" if well."""
    if not code:
        return ""
    lines = [line for line in text.splitlines() if line and line[0] != " " and "Error" in line]
    ended = f"died of {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return lines[-1].partition("]: ")[2][:160] or ended if lines else ended


def verdict(ranks: list[tuple[list[str], str]], single: list[list[float]]) -> str:
    """One line; steps count from 0."""
    losses = [[json.loads(line) for line in lines if line != DONE] for lines, _ in ranks]
    found = []
    for (lines, end), own, whole in zip(ranks, losses, single, strict=True):
        place = f"in step {len(own)}" if len(own) < len(whole) else "after its last step"
        is_done = lines[-1:] == [DONE]  # It may wait for the other for ever.
        verb = "hang" if end == "hangs" else "fail"
        found.append(f"{verb}{{}} {place}" if end and not (is_done and verb == "hang") else "")
    if all(found) and found[0] == found[1]:
        return f"both ranks {found[0].format('')}"
    if any(found):
        named = (f"rank {rank} {each.format('s')}" for rank, each in enumerate(found) if each)
        return ", ".join(named)
    pairs = [pair for a, b in zip(losses, single, strict=True) for pair in zip(a, b, strict=True)]
    if all(abs(a - b) < 1e-5 * abs(b) for a, b in pairs):
        return "trains, with the losses of one process"
    return f"trains, with OTHER LOSSES than one process: {pairs}"


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--limit", type=float, default=20.0, help="seconds without a step")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--engines", nargs="+", help="some of those of the case")
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure is not None:
        _main_of_rank(*args.measure)
    results: dict[str, dict[str, str]] = {}
    for name in args.cases:
        case = CASES[name]
        single, results[name] = train_single(case), {}
        for engine in case.engines:
            if args.engines is None or engine in args.engines:
                ranks = run([name, engine], args.limit)
                results[name][engine] = verdict(ranks, single)
                for rank, (_, end) in enumerate(ranks):
                    if end not in ("", "hangs"):
                        print(f"{name}, {engine}, rank {rank}: {end}")
        print()
        print_table([name, "what happens"], [list(row) for row in results[name].items()])
        print(flush=True)
    print_result(args, engines=results)


if __name__ == "__main__":
    main()
