"""The example of two modalities: its ranks have the losses of one process on all their batches."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from argparse import Namespace
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from tests.harness.checks import of_floats
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
    draws = importlib.util.find_spec("matplotlib") is not None
    picture = tmp_path / "losses.png" if draws else None
    run_ranks(2, _program, picture)
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("{")]
    sharded, *single = (json.loads(line)["losses"] for line in lines)
    assert len(sharded) == 12
    assert single == [sharded, sharded]
    assert picture is None or picture.exists()


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
