"""The package installs with, without and with a broken compiler, and says which of them it was;
where a device has no kernels of ours, plain torch runs and never blocks the host."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from layerzero import ops
from layerzero.ops import Segments, missing_kernels, native_status, ordered_sum_, pack_, reference
from layerzero.ops.native import load, ops_revision
from tests.ops.truth import concatenate, library

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what the build reads, and an nvcc that fails at once."""
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    shutil.copytree(ROOT / "layerzero" / "ops", tmp_path / "layerzero" / "ops")
    (tmp_path / "layerzero" / "__init__.py").touch()
    shutil.copy(ROOT / "layerzero" / "version.py", tmp_path / "layerzero")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").symlink_to("/bin/false")
    return tmp_path


def build(checkout: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """What pip runs for an editable install, without pip's seconds."""
    own = {"LAYERZERO_BUILD_EXT": "", "CUDA_HOME": str(checkout), **environment}
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    env = {**os.environ, **own}
    return subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True)


def lines_of_ours(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stdout.splitlines() if line.startswith("layerzero:")]


def test_a_broken_compiler_is_one_line_and_no_failure(checkout: Path) -> None:
    done = build(checkout, CC="/bin/false", CXX="/bin/false")
    assert done.returncode == 0, done.stderr
    (line,) = lines_of_ours(done)
    # How the compiler's failure is worded is setuptools' business and changes.
    assert "the native part is not built, plain torch runs instead: " in line
    assert "/bin/false" in line
    assert not list(checkout.glob("layerzero/_C*"))
    done = build(checkout, LAYERZERO_BUILD_EXT="0")
    assert done.returncode == 0, done.stderr
    assert lines_of_ours(done) == ["layerzero: the native part is not built: LAYERZERO_BUILD_EXT=0"]


@pytest.mark.slow
def test_a_broken_compiler_fails_where_the_native_part_is_asked_for(checkout: Path) -> None:
    done = build(checkout, CC="/bin/false", CXX="/bin/false", LAYERZERO_BUILD_EXT="1")
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert "the native part could not be built: " in last
    assert "/bin/false" in last


def test_the_status_says_why_no_library_was_loaded(tmp_path: Path) -> None:
    status = load(tmp_path)
    assert not status.native and not status.cuda
    assert f"no library in {tmp_path}" in status.reason and "pip install" in status.reason
    for content, reason in (
        (f"not a library: layerzero ops {ops_revision()}", "_C.abi3.so could not be loaded"),
        ("a library: layerzero ops 01234567", "was built for other ops: build it again"),
    ):
        (tmp_path / "_C.abi3.so").write_text(content)
        status = load(tmp_path)
        assert not status.native and reason in status.reason and "\n" not in status.reason


@pytest.mark.skipif(not native_status().cuda, reason=native_status().reason)
def test_the_current_stream_is_found_exactly_where_torch_has_cuda() -> None:
    assert bool(library().layerzero_finds_current_stream()) == (torch.version.cuda is not None)


_READS = ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "nonzero")


@contextmanager
def no_reads(allowed: torch.Tensor | None = None) -> Iterator[None]:
    """Every tensor but `allowed` stands for one on a device: to read its values raises."""

    def refused(name: str) -> Any:
        read = getattr(torch.Tensor, name)

        def call(tensor: torch.Tensor, *args: Any) -> Any:
            assert tensor is allowed, f"{name}() of a device tensor blocks the host"
            return read(tensor, *args)

        return call

    with ExitStack() as patches:
        for name in _READS:
            patches.enter_context(mock.patch.object(torch.Tensor, name, refused(name)))
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16, torch.complex64])
def test_plain_torch_reads_no_tensor_but_the_table(dtype: torch.dtype) -> None:
    segs = Segments.build([(0, 1, 2, 3), (1, 0, 8, 4)], 16)
    srcs = [torch.arange(5).to(dtype), torch.arange(4).to(dtype)]
    out, wanted = torch.ones(16, dtype=dtype), torch.zeros(16, dtype=dtype)
    wanted[2:5], wanted[8:12] = srcs[0][1:4], srcs[1]
    with no_reads(segs.table):
        reference.pack_(out, srcs, segs.table, 1.0)
    assert torch.equal(out, wanted)
    if dtype == torch.int16:
        return
    total = torch.empty_like(out)
    with no_reads():
        reference.ordered_sum_(total, [out, out], 0.5)
    assert torch.equal(total, out)


@pytest.mark.parametrize("kernel", [False, True], ids=["without", "with"])
def test_the_table_goes_where_it_is_read(kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The meta device stands for an accelerator, its fake kernel for what is dispatched to."""
    monkeypatch.setattr(ops, "has_kernel", lambda device_type: kernel)
    given: list[torch.Tensor] = []

    def watched(op: Any, out: Any, srcs: Any, segs: torch.Tensor, *rest: Any) -> None:
        given.append(segs)

    packet = type(torch.ops.layerzero.pack_.default)
    segs = concatenate([4], 8, 8)
    meta = torch.empty(4, device="meta")
    with mock.patch.object(packet, "__call__", watched):
        pack_(torch.empty(8, device="meta"), [meta], segs)
    assert [each.device.type for each in given] == ["meta" if kernel else "cpu"]
    assert given[0] is (segs.on(meta.device) if kernel else segs.table)
    pack_(torch.empty(8, device="meta"), [meta], segs)
    ordered_sum_(torch.empty(4, device="meta"), [meta, meta])


def test_what_is_missing_is_said_with_a_remedy() -> None:
    assert missing_kernels(torch.device("cpu")) is None
    xpu = missing_kernels(torch.device("xpu"))
    assert xpu is not None and "device type 'xpu': none exist" in xpu
    status = ops.native_status()
    cuda = missing_kernels(torch.device("cuda"))
    assert (cuda is None) == status.cuda
    if cuda is not None:
        assert status.reason in cuda and "pip install -v --no-build-isolation" in cuda
