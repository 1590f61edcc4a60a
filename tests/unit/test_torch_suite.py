"""python -m tests.torch_suite: a file of torch's kind runs under both engines."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.harness.forked_workers import python
from tests.harness.pages import REPOSITORY

FILE = """
import copy
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch.testing._internal.common_fsdp import FSDPTest, a_name_of_another_torch


class TestToy(FSDPTest):
    @property
    def world_size(self):
        return min(2, torch.cuda.device_count())

    @skip_if_lt_x_gpu(1)
    def test_right(self):
        model = nn.Linear(4, 4, device="cuda:0")
        expected = copy.deepcopy(model)
        fully_shard(model)
        for each in (model, expected):
            each(torch.ones(2, 4)).sum().backward()
        self.assertIsInstance(model.weight, DTensor)
        self.assertEqual(model.weight.device_mesh.ndim, 1)
        self.assertEqual(model.weight.full_tensor(), expected.weight)
        self.assertEqual(model.weight.grad.full_tensor(), expected.weight.grad)

    @skip_if_lt_x_gpu(1)
    def test_of_ours(self):
        self.assertEqual(hasattr(fully_shard(nn.Linear(4, 4)).weight, "layerzero"), True)
"""


@pytest.mark.slow
def test_what_differs_from_the_table_is_printed(tmp_path: Path) -> None:
    path = tmp_path / "test_toy.py"
    path.write_text(FILE)
    command = [python(), "-m", "tests.torch_suite", str(path)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    line = FILE[: FILE.index('"layerzero"')].count("\n") + 1
    assert done.returncode == 1 and done.stdout.splitlines() == [
        f"test_toy: TestToy.test_of_ours, torch: line {line}: AssertionError: "
        "Booleans mismatch: False is not True",
        "passed: {'torch': 1, 'ours': 2}; 1 differ from testing.md",
    ], done.stdout + done.stderr
