"""An error that nobody catches says so when its line used a sharded parameter for a whole one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_PROGRAM = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import linear
from torch.testing._internal.distributed.fake_pg import FakeStore
from layerzero import ZeRO3

dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
print_error = sys.excepthook
def own_hook(*error):
    print("the user's own hook", file=sys.stderr)
    print_error(*error)
sys.excepthook = own_hook
model = ZeRO3(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), auto_wrap_policy={nn.Linear})
ZeRO3(nn.Linear(2, 2))  # a second model changes nothing
x = torch.ones(3, 4)
try:
    linear(x, torch.ones(7, 5))
except RuntimeError:
    sys.excepthook(*sys.exc_info())
print("-- by index", file=sys.stderr)
try:
    linear(x, model[-1].weight)
except RuntimeError:
    sys.excepthook(*sys.exc_info())
print("-- by module", file=sys.stderr)
linear(x, model.module[1].weight)
"""


def test_only_an_error_where_a_shard_was_used_names_it(tmp_path: Path) -> None:
    program = tmp_path / "program.py"  # a file: the failing line is read from it
    program.write_text(_PROGRAM)
    found = subprocess.run([sys.executable, str(program)], capture_output=True, text=True)
    assert found.returncode == 1, found.stderr
    other, by_index, by_module = found.stderr.split("-- by ")
    assert "cannot be multiplied" in other
    assert "layerzero" not in other and "1-D shard" not in other
    for text in (by_index, by_module):
        assert text.count("each is this rank's 1-D shard: '1.weight' (elements 0 to ") == 1
        assert "of shape (2, 4)" in text and "summon_full_params()" in text
    assert [text.count("the user's own hook") for text in (other, by_index, by_module)] == [1, 1, 1]
