"""One kind of device is named only where torch or a framework has that limit (npu_xpu.md), and
every file asks one interface for streams."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import layerzero
from layerzero.build import device
from layerzero.build.device import check_device_type, current_accelerator
from layerzero.comm import collectives
from layerzero.comm.collectives import reduce_scatter
from layerzero.comm.pending import Operation
from layerzero.flat.device_streams import missing_stream_names, stream_interface

PACKAGE = Path(layerzero.__file__).parent
ALLOWED = {
    "watch/events.py": "calls of the CUDA driver, for events that have a CUDA handle",
    "build/arguments.py": "an example of a device, in a message",
    "build/device.py": "a comparison, in a message",
    "flat/host_memory.py": "torch binds the calls that register memory for CUDA and HIP alone",
    "graphs/capture.py": "the name of torch's class",
    "integrations/megatron/arguments.py": "the name of an option of Megatron",
    "ops/__init__.py": "the kernels that csrc/ has",
    "ops/native.py": "the kernels that csrc/ has",
    "parallel/manager.py": "torch has that attention for CUDA alone",
    "wrapper.py": "names of methods of nn.Module",
}


def _mentions(tree: ast.AST) -> Iterator[int]:
    """Lines of code that name CUDA; docstrings and comments may."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = ""  # `ast.walk` goes outside in.
        named = {
            ast.Attribute: "attr",
            ast.Name: "id",
            ast.Constant: "value",
            ast.ImportFrom: "module",
            ast.alias: "name",
        }.get(type(node))
        text = str(getattr(node, named)) if named else ""
        if re.search("cuda", text, re.IGNORECASE) and not text.startswith("layerzero."):
            yield getattr(node, "lineno", 0)


_MAKES = {"arange", "as_tensor", "empty", "full", "ones", "scalar_tensor", "tensor", "zeros"}


def test_every_tensor_that_is_made_names_its_device() -> None:
    """Else it lies where `torch.set_default_device` says: what is meant for the host, too."""
    without = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name("torch"), attr=name)):
                    if name in _MAKES and not {None, "device"} & {k.arg for k in node.keywords}:
                        without.append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert not without


def test_code_names_cuda_only_where_somebody_else_has_the_limit() -> None:
    found: dict[str, list[int]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        lines = list(_mentions(ast.parse(path.read_text())))
        if lines:
            found[path.relative_to(PACKAGE).as_posix()] = lines
    strangers = {name: lines for name, lines in found.items() if name not in ALLOWED}
    assert not strangers, f"name the device's module or type instead: {strangers}"
    assert set(found) == set(ALLOWED), "a reason without a line"


def test_a_line_that_names_cuda_is_found() -> None:
    for code in (
        'x = torch.device("cuda", 0)',
        "torch.cuda.synchronize()",
        "from torch.cuda import nvtx",
    ):
        assert list(_mentions(ast.parse(code))), code
    assert not list(_mentions(ast.parse('"""On CUDA."""\nx = 1  # cuda')))


@pytest.mark.parametrize(
    ("backend", "averages"), [("nccl", True), ("xccl", True), ("hccl", False), ("mccl", False)]
)
def test_only_backends_that_can_are_asked_for_an_average(backend: str, averages: bool) -> None:
    """HCCL takes an operation that it does not know for a sum."""
    asked = []

    def issue(summed: torch.Tensor, chunks: torch.Tensor, op: Any, group: Any) -> Any:
        asked.append(op)
        summed.copy_(chunks[:3] if op == dist.ReduceOp.AVG else 2 * chunks[:3])
        return mock.Mock()

    group: Any = SimpleNamespace(size=2, rank=0, backend=backend)
    with mock.patch.object(collectives, "_issue_reduce_scatter", issue):
        summed, pending = reduce_scatter(
            torch.ones(6), group, Operation("reduce-scatter", "a unit", 1), scale=0.5
        )
        pending.wait()
    assert asked == [dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM]
    assert summed.tolist() == [1.0] * 3


def test_megatron_models_go_to_the_accelerator_whatever_its_kind() -> None:
    with mock.patch.object(torch, "accelerator") as accelerator:
        accelerator.current_accelerator.return_value = torch.device("xpu")
        accelerator.current_device_index.return_value = 3
        assert current_accelerator() == torch.device("xpu", 3)
        accelerator.current_accelerator.return_value = None
        assert current_accelerator() is None
        accelerator.current_accelerator.return_value = torch.device("mps")
        with mock.patch.object(device, "has_generic_streams", lambda kind: False):
            assert current_accelerator() is None


CUDA = torch.device("cuda", 0)


class _Bare:
    """What a device from outside torch must have: no streams."""

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1


def test_without_streams_of_its_own_a_device_has_those_of_torch() -> None:
    assert stream_interface(CUDA) is torch.cuda
    module = _Bare()
    assert missing_stream_names(module) == ["Stream", "stream", "current_stream"]
    with mock.patch.object(torch, "get_device_module", lambda _: module):
        interface = stream_interface(CUDA)
    assert interface.Stream is torch.Stream
    assert not missing_stream_names(interface)


def test_a_device_without_either_is_refused_by_the_names_that_are_missing() -> None:
    with (
        mock.patch.object(torch, "cuda", _Bare()),
        pytest.raises(ValueError, match=r"torch\.cuda has no Stream, stream, current_stream"),
    ):
        check_device_type(CUDA, "device='cuda'")


def test_no_other_file_asks_a_device_module_for_streams() -> None:
    asks = re.compile(r"get_device_module\([^)]*\)\s*\.(Stream|stream|current_stream|Event)\b")
    found = [path.name for path in PACKAGE.rglob("*.py") if asks.search(path.read_text())]
    assert not found
