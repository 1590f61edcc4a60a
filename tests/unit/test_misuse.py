"""An error that nobody catches says so when its line used a sharded parameter for a whole one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_PROGRAM = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from layerzero import ZeRO3

dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
if {with_hook}:
    print_error = sys.excepthook
    def own_hook(*error):
        print("the user's own hook", file=sys.stderr)
        print_error(*error)
    sys.excepthook = own_hook
model = ZeRO3(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), auto_wrap_policy={{nn.Linear}})
ZeRO3(nn.Linear(2, 2))  # a second model changes nothing
x = torch.ones(3, 4)
torch.nn.functional.linear(x, {weight})
"""


def _stderr(folder: Path, weight: str, with_hook: bool) -> str:
    program = folder / "program.py"  # a file: the failing line is read from it
    program.write_text(_PROGRAM.format(weight=weight, with_hook=with_hook))
    found = subprocess.run([sys.executable, str(program)], capture_output=True, text=True)
    assert found.returncode == 1, found.stderr
    return found.stderr


@pytest.mark.parametrize(
    ("weight", "with_hook"), [("model.module[1].weight", False), ("model[-1].weight", True)]
)
def test_a_piece_used_outside_every_call_is_named(
    tmp_path: Path, weight: str, with_hook: bool
) -> None:
    text = _stderr(tmp_path, weight, with_hook)
    assert text.count("each is this rank's 1-D piece: '1.weight' (elements 0 to ") == 1
    assert "of shape (2, 4)" in text and "summon_full_params()" in text
    assert text.count("the user's own hook") == int(with_hook)


def test_other_errors_stay_as_they_are(tmp_path: Path) -> None:
    text = _stderr(tmp_path, "torch.ones(7, 5)", False)
    assert "cannot be multiplied" in text
    assert "layerzero" not in text and "1-D piece" not in text
