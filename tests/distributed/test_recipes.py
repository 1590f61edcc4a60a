"""Every block of Python in docs/howto/recipes.md runs, on two ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.harness.models import Block, Mlp, loss_of, rows
from tests.harness.ranks import run_ranks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "recipes.md"


def _sections() -> dict[str, list[str]]:
    """The blocks of each section, by its heading."""
    parts = re.split(r"^## (.+)$", PAGE.read_text(), flags=re.MULTILINE)[1:]
    blocks = (re.findall(r"^```python\n(.*?)^```$", text, re.S | re.M) for text in parts[1::2])
    return dict(zip(parts[::2], blocks, strict=True))


def _run(heading: str, folder: str) -> None:
    """The blocks of one section, one after the other, in one namespace."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    names = {
        "torch": torch,
        "nn": nn,
        "dist": dist,
        "Model": Mlp,
        "Block": Block,
        "loss_of": loss_of,
        "folder": folder,
        "batches": [rows(generator) for _ in range(3)],
    }
    for block in _sections()[heading]:
        exec(compile(block, f"{PAGE.name}, {heading}", "exec"), names)


@pytest.mark.parametrize("heading", [name for name, blocks in _sections().items() if blocks])
def test_recipe_runs(heading: str, tmp_path: Path) -> None:
    run_ranks(2, _run, heading, str(tmp_path))
