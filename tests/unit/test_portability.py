"""One kind of device is named only where torch or a framework has that limit (npu_xpu.md), and
every file asks one interface for streams. For which kind a mesh is made, how a world is cut into
axes, and what initialising on a device needs of torch: no ranks."""

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
from torch import Tensor

import layerzero
from layerzero.parallel.manager import MeshSizes, device_type_of
from tests.harness.internals import (
    Operation,
    _kept_generators,
    check_device_type,
    collectives,
    current_accelerator,
    device,
    reduce_scatter,
    stream_interface,
)

PACKAGE = Path(layerzero.__file__).parent
ALLOWED = {
    "watch/events.py": "calls of the CUDA driver, for events that have a CUDA handle",
    "build/arguments.py": "an example of a device, in a message",
    "build/device.py": "a comparison, in a message",
    "flat/host_memory.py": "torch binds the calls that register memory for CUDA and HIP alone",
    "guards/argument_warnings.py": "the kernels that csrc/ has",
    "graphs/capture.py": "the name of torch's class",
    "integrations/megatron/arguments.py": "the name of an option of Megatron",
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
        with mock.patch.object(device, "has_streams", lambda kind: False):
            assert current_accelerator() is None


CUDA = torch.device("cuda", 0)


BARE = SimpleNamespace(is_available=lambda: True, current_device=lambda: 0, device_count=lambda: 1)
"""What a device from outside torch must have: no streams."""


def test_without_streams_of_its_own_a_device_has_those_of_torch() -> None:
    assert stream_interface(CUDA) is torch.cuda
    module = BARE
    with mock.patch.object(torch, "get_device_module", lambda _: module):
        interface = stream_interface(CUDA)
    assert interface.Stream is torch.Stream
    assert {*dir(interface)} >= {"Stream", "stream", "current_stream"}


def test_a_device_without_either_is_refused() -> None:
    with (
        mock.patch.object(torch, "cuda", BARE),
        pytest.raises(ValueError, match="expected the CPU or an accelerator with streams"),
    ):
        check_device_type(CUDA, "device='cuda'")


def test_no_other_file_asks_a_device_module_for_streams() -> None:
    asks = re.compile(r"get_device_module\([^)]*\)\s*\.(Stream|stream|current_stream|Event)\b")
    found = [path.name for path in PACKAGE.rglob("*.py") if asks.search(path.read_text())]
    assert not found


def infer(world_size: int, **given: Any) -> MeshSizes:
    sizes: dict[str, Any] = {"dp_size": None, "zero3_size": None}
    sizes |= dict.fromkeys(("tp_size", "cp_size", "ep_size", "pp_size"), 1)
    return MeshSizes.infer(world_size, **sizes | given)


def test_data_parallel_ranks_are_what_the_other_sizes_leave() -> None:
    sizes = infer(48, tp_size=2, cp_size=3, pp_size=2, ep_size=6)
    assert sizes.shape == (2, 4, 3, 2)
    assert (sizes.data, sizes.edp, sizes.ep) == (12, 2, 6)
    assert infer(5).shape == (1, 5, 1, 1)
    assert infer(8, dp_size=4, tp_size=2) == infer(8, tp_size=2)


@pytest.mark.parametrize("unsaid", [None, 0])
def test_an_axis_that_a_recipe_leaves_open_is_inferred_or_one(unsaid: int | None) -> None:
    others = dict.fromkeys(("cp_size", "ep_size", "pp_size"), unsaid)
    expected = infer(8, tp_size=2)
    for dp_size in (unsaid, -1):
        assert infer(8, dp_size=dp_size, tp_size=2, **others) == expected
    assert infer(8, tp_size=unsaid, **others) == infer(8)


def test_sizes_that_do_not_fit_are_named_with_the_numbers() -> None:
    for world_size, given, error, message in (
        (6, {"pp_size": 2, "cp_size": 2}, ValueError, r"pp_size=2 x cp_size=2 .*= 4.*world of 6"),
        (4, {"dp_size": 3}, ValueError, r"dp_size=3 x .*makes 3 ranks, but the world has 4"),
        (4, {"dp_size": 4, "tp_size": 2}, ValueError, r"makes 8 ranks.*start 8 ranks"),
        (6, {"ep_size": 4}, ValueError, r"ep_size=4 does not divide the 6 data-parallel ranks"),
        (8, {"tp_size": 2, "zero3_size": 8}, ValueError, r"zero3_size=8 .*the 4 data-parallel"),
        (4, {"tp_size": -1}, ValueError, r"tp_size: expected at least 0, got -1"),
        (4, {"zero3_size": 0}, ValueError, r"zero3_size: expected at least 1, got 0"),
        (4, {"dp_size": "auto"}, TypeError, r"dp_size: expected a number of ranks, got 'auto'"),
        (4, {"cp_size": True}, TypeError, r"cp_size: expected a number of ranks, got True"),
    ):
        with pytest.raises(error, match=message):
            infer(world_size, **given)


def test_a_mesh_is_for_the_accelerator_that_the_backend_serves_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both = "cpu:gloo,cuda:gloo"
    for backend, accelerator, expected in (
        ("gloo", None, "cpu"),
        ("gloo", "cuda", "cpu"),  # it serves both, and who wants the other says another backend
        (both, "cuda", "cpu"),
        ("nccl", "cuda", "cuda"),
        ("cpu:gloo,cuda:nccl", "cuda", "cuda"),
        ("cpu:gloo,cuda:nccl", None, "cpu"),
        ("cpu:gloo,cuda:nccl", "xpu", "cpu"),  # an accelerator that the backend does not serve
        ("cuda:gloo", "cuda", "cuda"),
        ("npu:hccl", None, "npu"),
    ):
        found = None if accelerator is None else SimpleNamespace(type=accelerator)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda found=found: found)
        assert device_type_of(backend) == expected


class _TwoDevices:
    """The generators of two devices, of which the first is the current one; as in `torch.cuda`."""

    def __init__(self) -> None:
        self.states = [torch.tensor([1]), torch.tensor([2])]

    def get_rng_state(self, device: torch.device | str = "cuda") -> Tensor:
        return self.states[torch.device(device).index or 0]

    def set_rng_state(self, state: Tensor, device: torch.device | str = "cuda") -> None:
        self.states[torch.device(device).index or 0] = state


def test_the_generator_is_restored_of_the_models_device_also_where_another_one_is_current() -> None:
    module = _TwoDevices()
    with mock.patch.object(torch, "get_device_module", lambda _: module):
        before = torch.get_rng_state()
        kept = _kept_generators(torch.device("cuda", 1))
        torch.rand(3)
        module.states[1] = torch.tensor([3])
        for restore in kept:
            restore()
    assert torch.equal(torch.get_rng_state(), before)
    assert [int(state) for state in module.states] == [1, 2]
