"""The example of two modalities: its ranks have the losses of one process on all their batches."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.harness.checks import of_floats
from tests.harness.ranks import run_ranks

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_two_towers.py"
SMALL = ["--steps", "12", "--batch", "4"]


def _run(*command: str) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=100, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _losses(output: str) -> list[float]:
    return json.loads(output.splitlines()[-1])["losses"]  # type: ignore[no-any-return]


@pytest.mark.slow
def test_two_towers_train_like_one_process(tmp_path: Path) -> None:
    picture = tmp_path / "losses.png"
    example = [str(EXAMPLE), *SMALL]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    draws = importlib.util.find_spec("matplotlib") is not None
    plot = ["--plot", str(picture)] if draws else []
    sharded = _losses(_run(*launcher, "--", *example, *plot))
    single = _losses(_run(*example, "--single", "--ranks", "2"))
    assert len(sharded) == 12
    assert sharded == single
    assert picture.exists() == draws


def _on_these_ranks() -> tuple[list[float], list[float]]:
    """Losses of the ranks, and of one process."""
    sys.path.insert(0, str(EXAMPLE.parent))
    import train_two_towers as example

    rank, size = dist.get_rank(), dist.get_world_size()
    place = example.Place(rank=rank, local_rank=rank, local_world_size=size, world_size=size)
    options = Namespace(steps=12, batch=4, lr=2e-3, seed=0)
    return example.train_sharded(options, place), example.train_single(options, size)


@pytest.mark.slow
def test_two_towers_on_three_ranks_train_like_one_process() -> None:
    for sharded, single in run_ranks(3, _on_these_ranks, in_float64=True):
        assert len(sharded) == 12
        assert sharded == of_floats(single)
