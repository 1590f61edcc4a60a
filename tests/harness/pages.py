"""The pages of docs/ as tests read them: their blocks of Python, and a rank that runs these."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.harness.models import Block, Mlp, loss_of, rows

REPOSITORY = Path(__file__).resolve().parents[2]
DOCS = REPOSITORY / "docs"


def python_blocks(text: str) -> list[str]:
    """The fenced blocks of Python in a page, or in a part of one."""
    return re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def sections(text: str) -> dict[str, str]:
    """What stands under each heading of the second level."""
    parts = re.split(r"^## (.+)$", text, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def run_blocks(blocks: Sequence[str], title: str, folder: str, **more: Any) -> dict[str, Any]:
    """Run the blocks in one namespace, with the names that docs/howto/recipes.md introduces."""
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
        **more,
    }
    for block in blocks:
        exec(compile(block, title, "exec"), names)
    return names
