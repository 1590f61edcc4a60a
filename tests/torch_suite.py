"""Runs torch's own tests of `fully_shard` under torch's engine and under ours.

docs/internals/testing.md says how, and has the table: a test that passes or fails against it is
printed with its error, and makes the exit status 1. For GPUs `torch.cpu` counts four devices,
`skip_if_lt_x_gpu` skips nothing, and tests that torch runs in threads run in processes.
"""

import argparse
import ast
import contextlib
import fnmatch
import io
import multiprocessing
import re
import sys
import types
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import layerzero
from layerzero.state_dict.parameter_shard import ParameterShard
from tests.harness.pages import DOCS
from tests.harness.ranks import KeptRanks

# The base of torch's TestCase, of which these tests use nothing more.
sys.modules.setdefault("expecttest", types.SimpleNamespace(TestCase=unittest.TestCase))  # type: ignore[arg-type]
from torch.testing._internal import common_distributed, common_fsdp, common_utils  # noqa: E402

GPU_FILES = ("compile", "logging", "memory", "overlap")
"""Last words of the names of files that are left out: they need a GPU, or torch.compile for it."""
PAGE = DOCS / "internals" / "testing.md"
ENGINES = ("torch", "ours")
PASSED = "passed"
REWRITTEN = {
    r'"cuda(:\d)?"': '"cpu"',
    r"\btorch\.cuda\b": "torch.cpu",
    r"\.cuda\(\)": "",
    r"torch\.device\(\s*device_type\.type,\s*([\w.]+|\S+\.current_device\(\))\s*\)": "device_type",
    r"device_ids=\[[\w.]+\]": "device_ids=None",
    r"\._local_tensor\b(?! =)": ".to_local()",
    r"\S+\.device\.index == 1": "self.rank == 1",
    # A gradient does not lead to its parameter.
    r"([\w.]+)\.grad\.full_tensor\(\)": r"common_fsdp_full_gradient(\1)",
}

OMITTED = re.compile(
    r"\.device_mesh\b|\.placements\b|data_ptr|torch\.device\('meta'\)|backward_count >="
    r"|count_nonzero|self\.rank, 0|NotIsInstance\(param, DTensor|(gather|scatter|reduce)_count"
    r"|expected_all_reduces"
)
"""Assertions, conditions and assignments that are left out for ours: what only a DTensor has, where
a parameter is (small ones are on one rank; after a forward there are shards), and numbers of calls
of c10d (ours sends messages over gloo) and of functions of torch's engine."""


class RankTest(common_fsdp.FSDPTestMixin, common_utils.TestCase):
    """In place of torch's base classes, which start processes or threads: a rank is there."""

    rank = property(lambda self: dist.get_rank())
    process_group = property(lambda self: dist.group.WORLD)
    world_size = 4

    def perThreadSetUp(self) -> None: ...
    def perThreadTearDown(self) -> None: ...


class Sharded(type):
    def __instancecheck__(cls, it: object) -> bool:
        return isinstance(it, (DTensor, ParameterShard)) or hasattr(it, "layerzero")


class ShardedTensor(metaclass=Sharded):
    """In place of `DTensor`, whose instances ours are not."""


def full(tensor: Tensor) -> Tensor:
    info = getattr(tensor, "layerzero", None)
    return tensor.detach() if info is None else info.full_tensor()


def full_gradient(parameter: Tensor) -> Tensor:
    """`parameter.grad.full_tensor()`, of ours by way of the parameter."""
    if isinstance(parameter.grad, DTensor):
        return parameter.grad.full_tensor()
    with torch.no_grad():
        kept = parameter.clone()
        parameter.copy_(parameter.grad)
        whole = full(parameter)
        parameter.copy_(kept)
    return whole


def check_parity(
    case: unittest.TestCase, whole: nn.Module, sharded: nn.Module, prefixes_to_ignore: Any = ()
) -> None:
    pairs = zip(whole.named_parameters(), sharded.named_parameters(), strict=True)
    for (name, expected), (own_name, parameter) in pairs:
        for prefix in prefixes_to_ignore:
            own_name = own_name.replace(prefix, "")
        case.assertEqual(name, own_name)
        case.assertEqual(full(parameter), expected)
        case.assertEqual(parameter.grad is None, expected.grad is None)
        if expected.grad is not None:
            case.assertEqual(full_gradient(parameter), expected.grad)


SWAPS: dict[int, Any] = {
    id(getattr(owner, name)): getattr(layerzero, name)
    for owner in (torch.distributed.fsdp, torch.amp)
    for name in layerzero.__all__
    if hasattr(owner, name)
} | {id(DTensor): ShardedTensor, id(common_fsdp.check_sharded_parity): check_parity}


class LeaveOut(ast.NodeTransformer):
    def visit(self, node: ast.AST) -> ast.AST:
        text = ast.unparse(node.test if isinstance(node, ast.If) else node)
        is_kind = isinstance(node, (ast.If, ast.Assign, ast.AugAssign))
        if (is_kind or text.startswith("self.assert")) and OMITTED.search(text):
            return ast.copy_location(ast.Pass(), node) if isinstance(node, ast.stmt) else node
        return self.generic_visit(node)


def needs_ranks(number: int, **_: Any) -> Any:
    """`skip_if_lt_x_gpu`: says how many ranks a test needs, beside what its class says."""

    def mark(test: Any) -> Any:
        test.ranks = number
        return test

    return mark


def stand_in_for_gpus() -> None:
    torch.cpu.device_count = lambda: 4
    torch.Tensor.pin_memory = lambda tensor: tensor
    torch.cpu._sleep = lambda cycles: None
    common_utils.get_cycles_per_ms = lambda: 1.0
    common_distributed.skip_if_lt_x_gpu = needs_ranks
    common_fsdp.compiled_fsdp_test = lambda *_, **__: lambda test: test  # It puts torch's back.
    common_fsdp.FSDPTest = common_fsdp.FSDPTestMultiThread = RankTest
    common_fsdp.FSDPTestContinuous = RankTest


def load(path: Path, engine: str) -> types.ModuleType:
    """The tests of a file, for `engine`. What they import and torch lacks is an empty class."""
    name = f"{path.stem}_{engine}"
    if name in sys.modules:
        return sys.modules[name]
    stand_in_for_gpus()
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    text = path.read_text()
    for pattern, replacement in REWRITTEN.items():
        text = re.sub(pattern, replacement, text)
    tree = ast.parse(text)
    if engine == "ours":
        tree = LeaveOut().visit(tree)
    code = compile(tree, str(path), "exec", dont_inherit=True)
    while True:
        module = types.ModuleType(name)
        vars(module)["common_fsdp_full_gradient"] = full_gradient
        sys.modules[name] = module
        try:
            exec(code, vars(module))
            break
        except ImportError as error:
            missing = re.match(r"cannot import name '(\w+)' from '([\w.]+)'", str(error))
            if missing is None:
                raise
            setattr(sys.modules[missing[2]], missing[1], type(missing[1], (), {}))
    if engine == "ours":
        for each, value in list(vars(module).items()):
            setattr(module, each, SWAPS.get(id(value), value))
        torch.Tensor.to_local, torch.Tensor.full_tensor = lambda tensor: tensor, full
    return module


def tests_of(module: types.ModuleType) -> Iterator[tuple[type[Any], str]]:
    for cls in vars(module).values():
        if isinstance(cls, type) and cls.__module__ == module.__name__:
            for name in dir(cls) if issubclass(cls, unittest.TestCase) else ():
                if name.startswith("test_"):
                    yield cls, name


def run_test(path: Path, engine: str, class_name: str, name: str) -> str:
    """On a rank: one test; PASSED, or why it was skipped."""
    torch.distributed.tensor._random._rng_tracker = None
    case = getattr(load(path, engine), class_name)(name)
    common_utils.set_rng_seed()
    try:
        case.setUp()
        case.perThreadSetUp()
        getattr(case, name)()
        case.perThreadTearDown()
        torch.set_default_device(None)
        case.tearDown()
        case.doCleanups()
    except unittest.SkipTest as reason:
        return f"skipped: {reason}"
    return PASSED


def outcome(ranks: KeptRanks, path: Path, engine: str, cls: type[Any], name: str) -> str:
    try:
        size = max(int(cls(name).world_size), getattr(getattr(cls, name), "ranks", 1))
        with contextlib.redirect_stdout(io.StringIO()):  # What ranks have printed.
            return ranks(size, run_test, path, engine, cls.__name__, name, timeout=180)[0]
    except AssertionError as error:
        return str(error)


def expected() -> dict[str, set[str]]:
    """Pattern of a test's name -> engines under which it does not pass, from PAGE."""
    found: dict[str, set[str]] = {}
    section = PAGE.read_text().partition("## torch's own tests")[2].partition("\n## ")[0]
    for engines, names in re.findall(r"^\| (torch|ours|both) \| ([^|]*) \|", section, re.M):
        for name in re.findall(r"`([\w*]+)`", names):
            found.setdefault(name, set()).update(ENGINES if engines == "both" else [engines])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("-k", default="", help="only tests whose name contains this")
    arguments = parser.parse_args()
    files = sorted(arguments.path.resolve().glob("test_*.py")) or [arguments.path.resolve()]
    files = [path for path in files if not path.stem.endswith(GPU_FILES)]
    table, counts, differences = expected(), dict.fromkeys(ENGINES, 0), 0
    for path in files:
        for engine in ENGINES:
            ranks = KeptRanks()
            for cls, name in tests_of(load(path, engine)):
                if arguments.k not in name:
                    continue
                found = outcome(ranks, path, engine, cls, name)
                fails = any(engine in table[each] for each in table if fnmatch.fnmatch(name, each))
                counts[engine] += found == PASSED
                if fails is (found == PASSED):
                    differences += 1
                    print(f"{path.stem}: {cls.__name__}.{name}, {engine}: {found}", flush=True)
            ranks.close()
    print(f"passed: {counts}; {differences} differ from {PAGE.name}")
    return int(differences > 0)


if __name__ == "__main__":
    multiprocessing.freeze_support()
    # Ranks unpickle functions by the name of their module, which here would be __main__.
    from tests import torch_suite

    sys.exit(torch_suite.main())
