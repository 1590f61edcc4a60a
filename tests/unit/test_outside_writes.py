"""Nobody writes another object's state: in the engine, an object's methods change it."""

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "layerzero"
OF_TENSORS = (".grad", ".data")
"""Torch's own way to give a tensor these."""
CEILING = 5
"""Other writes that the engine has; fewer: lower it."""


def outside_writes(source: str) -> Iterator[tuple[int, str]]:
    """Lines that set or delete an attribute of something other than `self`, and which."""
    for node in ast.walk(ast.parse(source)):
        targets: list[ast.expr] = []
        if isinstance(node, (ast.Assign, ast.Delete)):
            targets = node.targets
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            targets = [node.target]
        for target in targets:
            for each in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(each, ast.Attribute) and ast.unparse(each.value) not in (
                    "self",
                    "cls",
                ):
                    yield each.lineno, ast.unparse(each)


def test_objects_of_the_engine_are_changed_by_their_own_methods() -> None:
    found = []
    for path in sorted(path for name in ("step", "flat") for path in (PACKAGE / name).glob("*")):
        if path.suffix == ".py":
            writes = outside_writes(path.read_text())
            found += [f"{path.name}: {what}" for _, what in writes if not what.endswith(OF_TENSORS)]
    assert len(found) == CEILING, found
