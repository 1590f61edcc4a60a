"""Golden runs: what many ways to train leave, bit for bit.

    python -m tests.golden build/golden.json                  # at the commit before a change
    python -m tests.golden --against build/golden.json        # at the commit after it

For changes that move code and are not meant to change numbers: toy models, native optimizers, and
random programs. Bits depend on the processor and on torch.
"""

import argparse
import functools
import json
import multiprocessing
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from layerzero import checkpoint
from layerzero.optim import AdamW, WholeTensorOptimizer
from tests.distributed.test_random_models import Run, train, train_apart, train_rounded
from tests.harness.compare import sharded
from tests.harness.models import CASES, loss_of
from tests.harness.ranks import KeptRanks
from tests.harness.reference import batches_of


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def native(state: str) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: AdamW(model.parameters(), lr=1e-2, state=state)


def muon(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.layerzero.ndim == 2]
    return WholeTensorOptimizer(matrices, torch.optim.Muon, lr=1e-2)


def of_case(name: str, make: Any = sgd, **options: Any) -> str:
    """The weights that a toy model of the harness has in the end, and its optimizer's state."""
    model = sharded(CASES[name], **options)
    optimizer = make(model)
    for step in batches_of(CASES[name], dist.get_world_size(), 6):
        optimizer.zero_grad()
        loss_of(model(step[dist.get_rank()])).backward()
        model.clip_grad_norm_(0.1)
        optimizer.step()
    return model.step_signature(optimizer)


def of_program(train: Callable[[int], Run], seed: int) -> str:
    """The values that a random program leaves."""
    state = checkpoint.get_model_state_dict(train(seed)._model, full=True)
    return f"{zlib.crc32(repr([value.tolist() for value in state.values()]).encode()):08x}"


LLM = functools.partial(of_case, "transformer")
RUNS: dict[str, tuple[int, Callable[[], str]]] = {
    **{name: (2, functools.partial(of_case, name)) for name in CASES if "_output" not in name},
    **{
        f"native adamw, {state} states": (2, functools.partial(LLM, native(state)))
        for state in ("float32", "bfloat16", "8bit")
    },
    "muon": (2, functools.partial(LLM, muon)),
    "3 ranks, deterministic": (3, functools.partial(LLM, deterministic=True)),
    **{
        f"{kind} program {seed}": (world_size, functools.partial(of_program, train, seed))
        for kind, train, world_size, seeds in (
            ("float64", train, 2, range(16)),
            ("float64", train, 4, range(100, 108)),
            ("low precision", train_rounded, 2, range(300, 312)),
            ("optional", train_apart, 3, range(700, 706)),
        )
        for seed in seeds
    },
}


def run(name: str) -> str:
    """Called on each rank."""
    return RUNS[name][1]()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("file", nargs="?", type=Path, help="where to write what this commit gives")
    where.add_argument("--against", type=Path, help="compare with such a file, and write nothing")
    parser.add_argument("-k", default="", help="only runs whose name contains this")
    arguments = parser.parse_args()
    found, ranks = {}, KeptRanks()
    for name, (world_size, _) in RUNS.items():
        if arguments.k in name:
            try:
                found[name] = ranks(world_size, run, name, timeout=120)[0]
            except AssertionError as error:
                found[name] = "failed"
                print(f"{name}: {str(error)[-1500:]}", file=sys.stderr)
            print(f"{name}: {found[name]}", file=sys.stderr)
    ranks.close()
    if arguments.against is None:
        arguments.file.parent.mkdir(parents=True, exist_ok=True)
        arguments.file.write_text(json.dumps(found, indent=1))
        return 0
    old = json.loads(arguments.against.read_text())
    lines = [f"{k}: {old.get(k)} -> {new}" for k, new in found.items() if old.get(k) != new]
    print("\n".join(lines) or f"{len(found)} runs: nothing differs")
    return bool(lines)


if __name__ == "__main__":
    multiprocessing.freeze_support()
    # Ranks unpickle functions by the name of their module, which here would be __main__.
    from tests import golden

    sys.exit(golden.main())
