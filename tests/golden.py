"""Golden runs: what many ways to train leave, bit for bit.

    python -m tests.golden build/golden.json                  # at the commit before a change
    python -m tests.golden --against build/golden.json        # at the commit after it

For changes that move code and are not meant to change numbers. Of each run `step_signature` covers
all weights, and optimizer state. Bits depend on the processor and on torch.
"""

import argparse
import functools
import json
import multiprocessing
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import layerzero
from layerzero import OffloadPolicy, ZeRO3
from tests.harness import stream_uses
from tests.harness.compare import sharded
from tests.harness.models import CASES, Block, Mlp, loss_of
from tests.harness.ranks import KeptRanks
from tests.harness.reference import batches_of, seeded

STEPS = 6


class Tower(nn.Module):
    """A trunk, and a tower that a batch enters or not."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.tower = Mlp(), Block()

    def forward(self, batch: tuple[Tensor, bool]) -> Tensor:
        x, enters = batch
        out = self.trunk(x)
        return out + self.tower(x).mean() if enters else out


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def native(**options: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: layerzero.optim.AdamW(model.parameters(), lr=1e-2, **options)


def muon(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.layerzero.ndim == 2]
    return layerzero.optim.WholeTensorOptimizer(matrices, torch.optim.Muon, lr=1e-2)


def of_steps(
    model: ZeRO3, optimizer: torch.optim.Optimizer, batches: Iterable[Any], clips: bool = False
) -> Iterator[str]:
    """The signature after each step."""
    for batch in batches:
        optimizer.zero_grad()
        loss_of(model(batch)).backward()
        if clips:
            model.clip_grad_norm_(0.1)
        optimizer.step()
        yield model.step_signature(optimizer)


def of_case(name: str, make: Any = sgd, clips: bool = False, **options: Any) -> list[str]:
    """A toy model of the harness."""
    model = sharded(CASES[name], **options)
    batches = batches_of(CASES[name], dist.get_world_size(), STEPS)
    own = [step[dist.get_rank()] for step in batches]
    return [*of_steps(model, make(model), own, clips)]


def of_use(use: Callable[[ZeRO3], None], **options: Any) -> list[str]:
    """A way to train, and the weights that it leaves."""
    model = stream_uses.wrapped(**options)
    use(model)
    return [model.step_signature()]


def optional() -> list[str]:
    """Ranks skip the tower in turns."""
    module = seeded(Tower)
    model = ZeRO3(module, auto_wrap_policy={Block}, optional_modules=[module.tower])
    rows = [step[dist.get_rank()] for step in batches_of(CASES["mlp"], 3, STEPS)]
    enters = [(step + dist.get_rank()) % 3 > 0 for step in range(STEPS)]
    return [*of_steps(model, sgd(model), zip(rows, enters, strict=True))]


def joined() -> list[str]:
    """The second rank has a batch more."""
    model = sharded(CASES["mlp"])
    optimizer, rank = sgd(model), dist.get_rank()
    with layerzero.join(model, optimizer):
        for step in batches_of(CASES["mlp"], 2, STEPS)[: 2 + rank]:
            optimizer.zero_grad()
            loss_of(model(step[rank])).backward()
            optimizer.step()
    return [model.step_signature(optimizer)]


LLM = functools.partial(of_case, "transformer")
MORE: dict[str, dict[str, Any]] = {
    "verified": {"verify": "always"},
    "on_nonfinite": {"on_nonfinite": "skip"},
    "offloaded": {"offload": OffloadPolicy(params=True, grads=True, pin_memory=False)},
    "compute shard": {"reshard_after_forward": "compute_shard", "zero3_size": 1},
}
RUNS: dict[str, tuple[int, Callable[[], list[str]]]] = {
    **{name: (2, functools.partial(of_case, name)) for name in CASES if "_output" not in name},
    **{f"use: {use.__name__}": (2, functools.partial(of_use, use)) for use in stream_uses.USES},
    **{
        f"setting: {name}": (2, functools.partial(LLM, **options))
        for name, options in (stream_uses.SETTINGS | MORE).items()
    },
    **{
        f"layered: {name}": (4, functools.partial(of_use, stream_uses.accumulation, **options))
        for name, options in stream_uses.LAYERED.items()
    },
    "3 ranks": (3, LLM),
    "3 ranks, deterministic": (3, functools.partial(LLM, deterministic=True)),
    "native adamw": (2, functools.partial(LLM, native(), clips=True)),
    "native adamw, bf16 state": (2, functools.partial(LLM, native(state="bfloat16"))),
    "native adamw, 8 bit": (2, functools.partial(LLM, native(state="8bit"))),
    "muon": (2, functools.partial(LLM, muon)),
    "optional": (3, optional),
    "joined": (2, joined),
}


def train(name: str) -> list[str]:
    """Called on each rank."""
    return RUNS[name][1]()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("file", nargs="?", type=Path, help="where to write what this commit gives")
    where.add_argument("--against", type=Path, help="compare with such a file, and write nothing")
    parser.add_argument("-k", default="", help="only runs whose name contains this")
    arguments = parser.parse_args()
    runs, ranks = {}, KeptRanks()
    for name, (world_size, _) in RUNS.items():
        if arguments.k in name:
            try:
                runs[name] = ranks(world_size, train, name, timeout=120)[0]
            except AssertionError as error:
                runs[name] = ["failed"]
                print(f"{name}: {str(error)[-1500:]}", file=sys.stderr)
            print(f"{name}: {runs[name][-1]}", file=sys.stderr)
    ranks.close()
    if arguments.against is None:
        arguments.file.parent.mkdir(parents=True, exist_ok=True)
        arguments.file.write_text(json.dumps(runs, indent=1))
        return 0
    old = json.loads(arguments.against.read_text())
    lines = [
        f"{name}: {old.get(name)} -> {new}" for name, new in runs.items() if old.get(name) != new
    ]
    print("\n".join(lines) or f"{len(runs)} runs: nothing differs")
    return bool(lines)


if __name__ == "__main__":
    multiprocessing.freeze_support()
    # Ranks unpickle functions by the name of their module, which here would be __main__.
    from tests import golden

    sys.exit(golden.main())
