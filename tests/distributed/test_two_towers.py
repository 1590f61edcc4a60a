"""The example of two modalities: its ranks have the losses of one process on all their batches."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from tests.harness.ranks import run_ranks

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_two_towers.py"
SMALL = ["--steps", "12", "--batch", "4"]


def _program(picture: Path | None) -> None:
    """As torchrun starts it, and then on this rank alone."""
    sys.path.insert(0, str(EXAMPLE.parent))
    import train_two_towers as example

    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    with mock.patch.object(dist, "init_process_group"):  # There is one.
        example.main([*SMALL, *(["--plot", str(picture)] if picture else [])])
    example.main([*SMALL, "--single", "--ranks", size])


@pytest.mark.slow
def test_two_towers_train_like_one_process(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two ranks, whose sums have one order, to the bit."""
    draws = importlib.util.find_spec("matplotlib") is not None
    picture = tmp_path / "losses.png" if draws else None
    run_ranks(2, _program, picture)
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("{")]
    sharded, *single = (json.loads(line)["losses"] for line in lines)
    assert len(sharded) == 12 and single == [sharded] * 2
    assert picture is None or picture.exists()
