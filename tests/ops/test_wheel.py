"""The wheel and the source distribution install in an empty environment and train a step there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # each makes an environment, and most compile

ROOT = Path(__file__).resolve().parents[2]

TRAIN_A_STEP = """
import sys, tempfile
from pathlib import Path
import torch, torch.distributed as dist
import layerzero

assert Path(layerzero.__file__).is_relative_to(sys.prefix), layerzero.__file__
store = Path(tempfile.mkdtemp()) / "store"
dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
model = layerzero.ZeRO3(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
before = model.weight.clone()
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
assert not torch.equal(before, model.weight)
dist.destroy_process_group()
print(layerzero.__version__, layerzero.native_status().native)
"""


def run(*command: str, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a source distribution of this checkout, and a wheel built from it."""
    pytest.importorskip("build")
    top = tmp_path_factory.mktemp("distributions")
    checkout = top / "checkout"
    ignored = shutil.ignore_patterns(".*", "dist", "out", "*.so", "*.egg-info")
    shutil.copytree(ROOT, checkout, ignore=ignored)
    shutil.rmtree(checkout / "build", ignore_errors=True)
    (top / "bin").mkdir()
    (top / "bin" / "nvcc").symlink_to(
        "/bin/false"
    )  # CUDA takes a minute: tests/ops/test_cuda_build.py
    # Optimizing takes two thirds of the time, and nothing here asks how fast the kernels are.
    compiler = top / "bin" / "g++"
    compiler.write_text('#!/bin/sh\nexec g++ "$@" -O0\n')
    compiler.chmod(0o755)
    tools = {"CC": str(compiler), "CXX": str(compiler)} if shutil.which("g++") else {}
    build = (sys.executable, "-m", "build", "--no-isolation", "--outdir", str(top / "dist"))
    said = run(*build, cwd=checkout, CUDA_HOME=str(top), LAYERZERO_BUILD_EXT="", **tools)
    (top / "dist" / "build.log").write_text(said)
    return top / "dist"


def environment(folder: Path) -> str:
    """Python of a new environment with torch, and without layerzero."""
    venv.create(folder, with_pip=False)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    # The .pth files there, an editable layerzero's among them, are not read through this one.
    (site_packages / "torch.pth").write_text(sysconfig.get_path("purelib"))
    return str(folder / "bin" / "python")


def install(python: str, distribution: Path, **variables: str) -> None:
    options = ("--no-index", "--no-deps", "--no-build-isolation", "--ignore-installed")
    pip = (python, "-m", "pip", "--quiet", "--disable-pip-version-check", "install")
    run(*pip, *options, str(distribution), cwd=distribution.parent, **variables)


def train(python: str, folder: Path) -> list[str]:
    return run(python, "-c", TRAIN_A_STEP, cwd=folder, PYTHONPATH="").split()


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ on this machine")
def test_a_wheel_installs_with_its_kernels(distributions: Path, tmp_path: Path) -> None:
    (wheel,) = distributions.glob("*.whl")
    assert "-cp310-abi3-" in wheel.name, "one wheel for all versions of Python"
    python = environment(tmp_path / "env")
    install(python, wheel)
    version, is_native = train(python, tmp_path)
    assert wheel.name.startswith(f"layerzero-{version}-") and is_native == "True"


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ on this machine")
def test_a_broken_nvcc_leaves_the_cpu_kernels(distributions: Path) -> None:
    said = (distributions / "build.log").read_text()
    (line,) = [line for line in said.splitlines() if line.startswith("layerzero:")]
    assert "the CUDA part is not built" in line and "warning:" not in said
    (wheel,) = distributions.glob("*.whl")
    library = zipfile.ZipFile(wheel).read("layerzero/_C.abi3.so")
    assert b"layerzero_force_baseline" in library
    assert b"layerzero_finds_current_stream" not in library


def test_a_source_distribution_installs_without_a_compiler(
    distributions: Path, tmp_path: Path
) -> None:
    (source,) = distributions.glob("*.tar.gz")
    python = environment(tmp_path / "env")
    install(python, source, CC="no-such-compiler", CXX="no-such-compiler", LAYERZERO_BUILD_EXT="")
    version, is_native = train(python, tmp_path)
    assert source.name == f"layerzero-{version}.tar.gz" and is_native == "False"
