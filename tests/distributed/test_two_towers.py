"""The example of two modalities: its ranks have the losses of one process on all their batches."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_two_towers_train_like_one_process(num_ranks: int, tmp_path: Path) -> None:
    picture = tmp_path / "losses.png"
    example = [str(EXAMPLE), *SMALL]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    # Drawn once: with a picture, one process trains again.
    draws = num_ranks == 2 and importlib.util.find_spec("matplotlib") is not None
    plot = ["--plot", str(picture)] if draws else []
    sharded = _losses(_run(*launcher, "--", *example, *plot))
    single = _losses(_run(*example, "--single", "--ranks", str(num_ranks)))
    assert len(sharded) == 12
    if num_ranks == 2:
        assert sharded == single
    torch.testing.assert_close(torch.tensor(sharded), torch.tensor(single), rtol=1e-4, atol=0)
    assert picture.exists() == draws
