"""Imports point one way, file by file, and `import layerzero` needs torch and numpy alone."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "layerzero"
ENGINE = [
    *("version", "errors", "notices", "config", "wrapper"),
    *("ops", "flat", "watch", "comm", "step", "build"),
]
LAYERS = [
    *ENGINE,
    "experts",
    "optional",
    "optim",
    "guards",
    "verify",
    "uneven",
    "state_dict",
    "module_tree",
    "memory_budget",
    "graphs",
    "wrapping",
    "fsdp",
    "checkpoint",
    "memory_plan",
    "step_ledger",
    "plan",
    "parallel",
    "integrations",
]
"""Lowest first. What one step and its construction need is the engine: it imports no feature, and
`wrapping` puts features in."""
WINGS_OF_CHECKPOINT = ["format", "delta", "", "__main__"]
"""Lowest first; "": the files of the folder itself."""
FACES = {
    "layerzero",
    "layerzero.config",
    "layerzero.checkpoint",
    "layerzero.checkpoint.adapters",
    "layerzero.integrations.engine",
}
"""What adapters may import, beside each other."""

Imports = dict[str, set[str]]


def module_name(path: Path) -> str:
    parts = ("layerzero", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def read_imports() -> Imports:
    """By module, the modules of the package that it imports: anywhere in its file, also inside
    functions and for annotations alone."""
    files = {module_name(path): path for path in PACKAGE.rglob("*.py")}
    found: Imports = {}
    for module, path in files.items():
        own = found.setdefault(module, set())
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                own |= {alias.name for alias in node.names} & files.keys()
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{path}: relative imports are not read here"
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    own.add(inner if inner in files else node.module or "")
        own.intersection_update(files)
        own.discard(module)
    return found


@pytest.fixture(scope="module")
def imports() -> Imports:
    return read_imports()


def circles(arrows: Imports) -> list[set[str]]:
    """Sets of more than one node that all lead to each other."""
    reached: Imports = {}
    for start in arrows:
        seen: set[str] = set()
        todo = [start]
        while todo:
            new = arrows.get(todo.pop(), set()) - seen
            seen |= new
            todo += new
        reached[start] = seen
    found: list[set[str]] = []
    for node in arrows:
        if node in reached[node] and not any(node in circle for circle in found):
            found.append({each for each in reached[node] if node in reached[each]})
    return [circle for circle in found if len(circle) > 1]


def layer_of(module: str) -> str:
    return module.split(".")[1]


def test_circles_are_found() -> None:
    arrows = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"a"}}
    assert circles(arrows) == [{"b", "c"}]


def wing_of_checkpoint(module: str) -> int:
    part = module.split(".")[2] if module.count(".") > 1 else ""
    return WINGS_OF_CHECKPOINT.index(part if part in WINGS_OF_CHECKPOINT else "")


def may_import(module: str, other: str) -> bool:
    if "layerzero" in (module, other):
        return module == "layerzero" or layer_of(module) == "integrations"
    own, others = layer_of(module), layer_of(other)
    if own == "integrations" and module not in FACES and others != own:
        return other in FACES
    if own == others == "checkpoint":
        return wing_of_checkpoint(other) <= wing_of_checkpoint(module)
    return LAYERS.index(others) <= LAYERS.index(own)


def test_imports_point_one_way(imports: Imports) -> None:
    pairs = [(module, other) for module, imported in imports.items() for other in imported]
    assert len(pairs) > 500
    assert [pair for pair in pairs if not may_import(*pair)] == []


def test_an_import_from_above_is_found() -> None:
    assert not may_import("layerzero.flat.layout", "layerzero.step.unit")
    assert not may_import("layerzero.checkpoint.format.folder", "layerzero.checkpoint.saving")
    assert not may_import("layerzero.integrations.megatron", "layerzero.step.unit")
    assert not may_import("layerzero.optim.adamw", "layerzero")


def test_no_file_is_in_a_circle(imports: Imports) -> None:
    found = [sorted(circle) for circle in circles(imports)]
    assert not found, f"these files import each other: {found}"


def test_no_folder_is_in_a_circle(imports: Imports) -> None:
    """Of each package: its files and the packages inside it, each of these as one."""
    packages = {module_name(path) for path in PACKAGE.rglob("__init__.py")}
    for package in packages:
        start = package + "."

        def child_of(module: str, start: str = start) -> str:
            return start + module.removeprefix(start).split(".")[0]

        arrows: Imports = {}
        for module, imported in imports.items():
            if module.startswith(start):
                inner = {child_of(each) for each in imported if each.startswith(start)}
                arrows.setdefault(child_of(module), set()).update(inner - {child_of(module)})
        for circle in circles(arrows):
            raise AssertionError(f"in {package} these import each other: {sorted(circle)}")


def test_one_file_lets_tests_look_inside_the_engine() -> None:
    """Where something of the engine moves, no test changes. Tests of integers, and of ops, may."""
    rooms = re.compile(r"layerzero\.(flat|step|comm|watch|build)\b")
    tests = PACKAGE.parent / "tests"
    found = {
        path.relative_to(tests).as_posix()
        for path in tests.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.Import, ast.ImportFrom)) and rooms.search(ast.unparse(node))
    }
    assert found == {"harness/internals.py", "unit/test_host_memory.py", "unit/test_layout.py"}


def test_the_interface_for_adapters_stays_small() -> None:
    from layerzero.integrations import engine

    names = [name for name in vars(engine) if not name.startswith("_")]
    assert 20 < len(names) <= 30


def test_an_attribute_on_a_users_object_belongs_to_one_file() -> None:
    """Two files that gave one name to different things would read each other's."""
    owners: dict[str, list[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for name in set(re.findall(r'"(_layerzero_\w+)"', path.read_text())):
            owners.setdefault(name, []).append(module_name(path))
    assert owners
    assert not {name: files for name, files in owners.items() if len(files) > 1}


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    import layerzero

    with pytest.raises(AttributeError, match="no attribute 'checkpoints'"):
        layerzero.checkpoints  # noqa: B018


PROGRAM = """
import os, sys
# All that torch itself needs of this system is loaded first.
import numpy, torch, torch.distributed.tensor, torch.distributed._state_dict_utils
for name in ("fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios"):
    sys.modules[name] = None
for name in dir(os):
    if name.startswith(("sched_", "posix_", "RWF_", "POSIX_", "O_DIRECT", "O_DSYNC", "SCHED_")):
        delattr(os, name)
for name in ("fork", "preadv", "pwritev", "register_at_fork", "sysconf"):
    delattr(os, name)
before = {name.split(".")[0] for name in sys.modules}
import layerzero
loaded = set(sys.modules)
new = {name.split(".")[0] for name in loaded} - before - set(sys.stdlib_module_names)
print(*new, layerzero.checkpoint.save.__name__)
print(*{name.split(".")[1] for name in loaded if name.startswith("layerzero.")})
import layerzero.checkpoint.__main__
"""


def test_an_import_needs_torch_numpy_and_no_posix_system_and_loads_features_at_their_use() -> None:
    """torch runs on Windows and macOS, too."""
    command = [sys.executable, "-c", PROGRAM]
    found = subprocess.run(command, capture_output=True, text=True, cwd=PACKAGE.parent)
    assert not found.returncode, found.stderr
    new, rooms = found.stdout.splitlines()
    assert new.split() == ["layerzero", "save"]
    assert {"step", "flat"} <= set(rooms.split()) <= set(ENGINE)
