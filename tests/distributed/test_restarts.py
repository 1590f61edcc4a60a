"""Ranks killed at random moments and started again: the losses are those of an undisturbed run.

`make soak` kills a thousand times, and twenty times under torchrun; here are four, and with
`--slow` one.
"""

import random
import sys
from pathlib import Path

import pytest

from tests.faults import soak
from tests.faults.torchrun import kill_under_torchrun

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="gloo is told Linux's loopback")


def test_kills_and_one_rank_fewer_leave_the_losses_as_they_are(tmp_path: Path) -> None:
    """Two with three ranks, and then with two."""
    result = soak.disturbed(tmp_path, 2, 0.5, [3, 2], 0)
    assert not result.problems, result.problems
    assert result.kills == 4
    assert result.useful_steps >= 12 and result.lines >= 30


@pytest.mark.soak
def test_under_torchrun_too(tmp_path: Path) -> None:
    (hurt := tmp_path / "hurt").mkdir()
    (whole := tmp_path / "whole").mkdir()
    assert kill_under_torchrun(hurt, 40, 1, 1.0, random.Random(0)) == 1
    count, problems = soak.compare(hurt, whole)
    assert count >= 80 and not problems, problems


def test_a_loss_that_differs_is_found(tmp_path: Path) -> None:
    """Of the comparison itself: one bit of one loss, and a step that is missing."""
    for name, losses in (("hurt", [0.5, 0.25]), ("whole", [0.5, 0.25000000000000006])):
        (tmp_path / name).mkdir()
        lines = [f"{step} 1 {loss.hex()}\n" for step, loss in enumerate(losses)]
        (tmp_path / name / "losses-0").write_text("".join(lines))
    count, problems = soak.differences(tmp_path / "hurt", tmp_path / "whole")
    assert count == 2 and len(problems) == 1 and "step=1" in problems[0]
    (tmp_path / "hurt" / "losses-0").write_text("1 1 0x1.0p-1\n")
    assert soak.compare(tmp_path / "hurt", tmp_path / "other") == (0, ["steps are missing"])
