"""Damaged and forged checkpoints: CheckpointError or a right load, soon, and nothing changes.

A case is a number: `case(seed)` makes the same damage everywhere. Forged ones have right checksums.
"""

from __future__ import annotations

import copy
import logging
import random
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from layerzero import ZeRO3
from layerzero.checkpoint import CheckpointError, load, save
from layerzero.checkpoint.__main__ import verify
from layerzero.checkpoint.format.folder import resolve
from tests.harness import mutate
from tests.harness.bounds import MOST_NBYTES, limited_memory, outcome, peak_nbytes
from tests.harness.ranks import run_ranks

FEW = 40
EXTRA = {
    "step": 3,
    "seen": (1, {2, 3}, b"bytes", float("nan")),
    "generator": torch.arange(5),
    3: None,
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 4)
        self.b = nn.Linear(4, 3)
        self.b.register_buffer("scale", torch.ones(3))
        self.state = {"seen": 1}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.a(x))) * self.b.scale

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


class Trainer:
    """All that a load may change."""

    def __init__(self) -> None:
        self.model = ZeRO3(Model(), auto_wrap_policy={nn.Linear})
        self.optimizer = torch.optim.AdamW(
            [{"params": self.model.a.parameters()}, {"params": self.model.b.parameters()}], lr=0.1
        )
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3)
        self.model(torch.ones(2, 5)).sum().backward()
        self.optimizer.step()
        self.scheduler.step()

    def state(self) -> dict[str, Any]:
        optimizer = self.optimizer.state_dict()
        return {
            "parameters": [p.detach().clone() for p in self.model.parameters()],
            "buffers": [b.clone() for b in self.model.buffers()],
            "optimizer": {k: {**v} for k, v in optimizer["state"].items()},
            "groups": [{**group} for group in optimizer["param_groups"]],
            "scheduler": dict(self.scheduler.state_dict()),
            "extra": copy.deepcopy(self.model.module.state),
        }


def equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and torch.equal(left, right)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(equal, left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(left[k], right[k]) for k in left)
    return bool(left == right)


def damage(rng: random.Random, root: Path, elsewhere: Path) -> str:
    """Change one thing in a copy of a root of checkpoints; returns what, for messages."""
    folder = next(root.glob("step-*"))
    files = sorted(folder.iterdir())
    weights = [path for path in files if path.suffix == ".safetensors"]
    manifest = folder / "checkpoint.json"
    way = rng.choice(("manifest",) * 4 + ("bytes", "head", "forged head", "replaced", "latest"))
    if way == "manifest":
        mutate.seal(manifest, mutate.mutate_json(rng, mutate.manifest_of(manifest)))
    elif way == "bytes":
        path = rng.choice(files)
        path.write_bytes(mutate.mutate_bytes(rng, path.read_bytes()))
    elif way in ("head", "forged head"):
        path = rng.choice(weights)
        mutate.mutate_head(rng, path)
        if way == "forged head":
            found, data = mutate.manifest_of(manifest), path.read_bytes()
            found["files"][path.name] = {"nbytes": len(data), "crc32": zlib.crc32(data)}
            mutate.seal(manifest, found)
    elif way == "replaced":
        mutate.replace_file(rng, rng.choice(files), elsewhere)
    else:
        text = rng.choice((*mutate.NAMES, "step-00000007", "step-../..", "step-" + "9" * 5000))
        (root / "latest").write_text(text, errors="surrogatepass")
    if rng.random() < 0.2 and not manifest.is_dir():
        manifest.unlink(missing_ok=True)  # Weights from another source.
        way += ", without a manifest"
    return way


def tree_of(root: Path) -> dict[str, tuple[int, int]]:
    found = ((path, path.lstat()) for path in sorted(root.rglob("*")))
    return {str(path): (status.st_size, status.st_mtime_ns) for path, status in found}


def check_case(seed: int, template: Path, root: Path, trainer: Trainer) -> str | None:
    """None, or what is wrong with the outcome."""
    rng = random.Random(seed)
    shutil.copytree(template, root)
    way = damage(rng, root, template / "latest")
    tree, begun = tree_of(root), trainer.state()
    arguments: dict[str, Any] = {"strict": rng.random() < 0.7}
    if rng.random() < 0.8:
        arguments["optimizer"] = trainer.optimizer
    if rng.random() < 0.8:
        arguments["scheduler"] = trainer.scheduler

    def verifies() -> None:
        for _, damages in verify(resolve(root)):
            if damages:
                raise CheckpointError(" ".join(damages))

    _, problem = outcome(verifies)
    if problem is None:
        loaded, problem = outcome(lambda: load(root, trainer.model, **arguments))
        if loaded:  # Something harmless, or a forged value that nothing can tell from a right one.
            load(template, trainer.model, trainer.optimizer, scheduler=trainer.scheduler)
        elif problem is None and not equal(trainer.state(), begun):
            problem = "a failed load changed something"
    if problem is None and tree_of(root) != tree:
        problem = "files were written"
    shutil.rmtree(root)
    return problem and f"case {seed} ({way}): {problem}"


def check_cases(seeds: range, template: Path, scratch: Path) -> list[str]:
    logging.getLogger("layerzero").setLevel(logging.CRITICAL)
    trainer = Trainer()
    save(template, trainer.model, trainer.optimizer, scheduler=trainer.scheduler, extra=EXTRA)
    before = peak_nbytes()
    problems = []
    with limited_memory():
        for seed in seeds:
            problem = check_case(seed, template, scratch / "case", trainer)
            if problem is not None:
                problems.append(problem)
                trainer = Trainer()
    grown = peak_nbytes() - before
    if grown > MOST_NBYTES:
        problems.append(f"host memory grew by {grown} bytes")
    return problems


def test_forged_checkpoints_are_refused_and_change_nothing(
    tmp_path: Path, seeds_or: Callable[[int], range]
) -> None:
    (tmp_path / "scratch").mkdir()
    arguments = (seeds_or(FEW), tmp_path / "root", tmp_path / "scratch")
    (problems,) = run_ranks(1, check_cases, *arguments, timeout=3600.0)
    assert not problems, "\n".join(problems[:20])
