"""Every block of Python in docs/howto/recipes.md runs, on two ranks."""

from pathlib import Path

import pytest

from tests.harness.pages import DOCS, python_blocks, run_blocks, sections
from tests.harness.ranks import on_ranks

PAGE = DOCS / "howto" / "recipes.md"
BLOCKS = {name: python_blocks(text) for name, text in sections(PAGE.read_text()).items()}


@pytest.mark.parametrize("heading", [name for name, blocks in BLOCKS.items() if blocks])
@on_ranks(2)
def test_recipe_runs(heading: str, tmp_path: Path) -> None:
    """The blocks of one section, one after the other, in one namespace."""
    run_blocks(BLOCKS[heading], f"{PAGE.name}, {heading}", str(tmp_path))
