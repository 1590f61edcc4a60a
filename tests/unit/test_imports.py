"""Imports point one way, and `import layerzero` needs torch and numpy alone."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "layerzero"
LAYERS = [
    "version",
    "notices",
    "config",
    "ops",
    "core",
    "comm",
    "runtime",
    "optim",
    "state_dict",
    "construct",
    "by_hand",
    "log",
    "wrapper",
    "zero3",
    "rewrap",
    "checkpoint",
    "plan",
    "parallel",
    "integrations",
]


def imported_layers(path: Path) -> set[str]:
    layers = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []  # names for annotations only
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        layers |= {name.split(".")[1] for name in names if name.startswith("layerzero.")}
    return layers


def test_imports_point_one_way() -> None:
    for path in PACKAGE.rglob("*.py"):
        layer = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if layer == "__init__":
            continue
        allowed = set(LAYERS[: LAYERS.index(layer) + 1])
        upward = imported_layers(path) - allowed
        assert not upward, f"{path.relative_to(PACKAGE)} imports {sorted(upward)} from above"


def test_importing_layerzero_loads_nothing_but_torch_and_numpy() -> None:
    code = (
        "import sys, torch, numpy, torch.distributed.tensor\n"
        "before = {name.split('.')[0] for name in sys.modules}\n"
        "import layerzero\n"
        "after = {name.split('.')[0] for name in sys.modules}\n"
        "print(*sorted(after - before - set(sys.stdlib_module_names)))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent
    )
    assert found.stdout.split() == ["layerzero"]
