"""The package installs with, without and with a broken compiler, and says which of them it was."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import layerzero
from layerzero.ops import native_status
from layerzero.ops.native import load
from tests.harness.processes import run_script
from tests.ops.truth import library

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what the build reads, and an nvcc that fails at once."""
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    (tmp_path / "layerzero").mkdir()
    (tmp_path / "layerzero" / "__init__.py").touch()
    shutil.copy(ROOT / "layerzero" / "version.py", tmp_path / "layerzero")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").symlink_to("/bin/false")
    return tmp_path


def build(checkout: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """What pip runs for an editable install, without pip's seconds."""
    return run_script(
        checkout / "setup.py",
        *("build_ext", "--inplace"),
        cwd=checkout,
        environment={"LAYERZERO_BUILD_EXT": "", "CUDA_HOME": str(checkout), **environment},
    )


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


@pytest.mark.slow
def test_a_broken_compiler_fails_where_the_native_part_is_asked_for(checkout: Path) -> None:
    done = build(checkout, CC="/bin/false", CXX="/bin/false", LAYERZERO_BUILD_EXT="1")
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert "the native part could not be built: " in last
    assert "/bin/false" in last


@pytest.mark.slow
def test_a_missing_compiler_is_one_line_and_no_failure(checkout: Path) -> None:
    done = build(checkout, CC="no-such-compiler", CXX="no-such-compiler")
    assert done.returncode == 0, done.stderr
    assert len(lines_of_ours(done)) == 1


def test_a_build_that_is_not_wanted_is_left_out(checkout: Path) -> None:
    done = build(checkout, LAYERZERO_BUILD_EXT="0")
    assert done.returncode == 0, done.stderr
    assert lines_of_ours(done) == ["layerzero: the native part is not built: LAYERZERO_BUILD_EXT=0"]


def test_the_status_says_that_no_library_was_built(tmp_path: Path) -> None:
    status = load(tmp_path)
    assert not status.native and not status.cuda
    assert f"no library in {tmp_path}" in status.reason and "pip install" in status.reason


def test_the_status_says_why_a_library_does_not_load(tmp_path: Path) -> None:
    (tmp_path / "_C.abi3.so").write_text("not a library")
    status = load(tmp_path)
    assert not status.native and "could not be loaded" in status.reason
    assert "_C.abi3.so" in status.reason and "\n" not in status.reason


def test_the_status_is_public() -> None:
    status = layerzero.native_status()
    assert status == native_status()
    assert bool(status.reason) != (status.native and status.cuda)


@pytest.mark.skipif(not native_status().cuda, reason=native_status().reason)
def test_the_current_stream_is_found_exactly_where_torch_has_cuda() -> None:
    assert bool(library().layerzero_finds_current_stream()) == (torch.version.cuda is not None)
