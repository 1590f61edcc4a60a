"""A wheel built from the source distribution installs in an empty environment and trains a step
there; its kernels run all tests of the ops under the address and undefined-behaviour sanitizers."""

import os
import re
import shutil
import subprocess
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from tests.harness.processes import call_alone
from tests.ops.test_cuda_emulation import has_sanitizers

ROOT = Path(__file__).resolve().parents[2]
SANITIZERS = "-fsanitize=address,undefined -fno-sanitize-recover=all"


def run(*command: object, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _build(hook: str, target: Path) -> None:
    """As `python -m build --no-isolation` and pip do, by the name of a hook of PEP 517."""
    from setuptools import build_meta

    getattr(build_meta, hook)(str(target))


def build(hook: str, source: Path, target: Path, **environment: str) -> str:
    done = call_alone(_build, hook, target, cwd=source, environment=environment, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def _make_wheel(top: Path) -> tuple[Path, str]:
    """A wheel, made from a source distribution of this checkout, and what the build said."""
    checkout = top / "checkout"
    ignored = shutil.ignore_patterns(".*", "dist", "out", "*.so", "*.egg-info")
    shutil.copytree(ROOT, checkout, ignore=ignored)
    shutil.rmtree(checkout / "build", ignore_errors=True)
    (top / "bin").mkdir()
    # CUDA takes a minute: tests/ops/test_cuda_build.py
    (top / "bin" / "nvcc").symlink_to("/bin/false")
    # Optimizing takes two thirds of the time, and nothing here asks how fast the kernels are.
    compiler = top / "bin" / "g++"
    sanitizers = SANITIZERS if has_sanitizers(top) else ""
    compiler.write_text(f'#!/bin/sh\nexec g++ "$@" -O0 -g1 {sanitizers}\n')
    compiler.chmod(0o755)
    tools = {"CC": str(compiler), "CXX": str(compiler), "CUDA_HOME": str(top)}
    dist = top / "dist"
    dist.mkdir()
    build("build_sdist", checkout, dist)
    with tarfile.open(next(dist.glob("*.tar.gz"))) as archive:
        archive.extractall(dist, filter="data")
    said = build("build_wheel", next(dist.glob("*/")), dist, LAYERZERO_BUILD_EXT="", **tools)
    (wheel,) = dist.glob("*.whl")
    return wheel, said


def _library_of_gcc(name: str) -> str:
    return run("g++", f"-print-file-name={name}.so", cwd=ROOT).strip()


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ on this machine")
@pytest.mark.slow  # It compiles, and makes an environment.
def test_a_wheel_installs_with_its_kernels(tmp_path: Path) -> None:
    wheel, built = _make_wheel(tmp_path)
    assert "-cp310-abi3-" in wheel.name, "one wheel for all versions of Python"
    (line,) = [line for line in built.splitlines() if line.startswith("layerzero:")]
    assert "the CUDA part is not built" in line, "nvcc is broken"
    assert not re.search(r"csrc\S*: warning:", built)
    library = zipfile.ZipFile(wheel).read("layerzero/_C.abi3.so")
    assert b"layerzero_force_baseline" in library
    assert b"layerzero_finds_current_stream" not in library
    # An environment with torch, and without layerzero: the .pth files of this one, an editable
    # layerzero's among them, are not read through another.
    venv.create(tmp_path / "env", with_pip=False)
    (site_packages,) = (tmp_path / "env").glob("lib/python*/site-packages")
    (site_packages / "torch.pth").write_text(sysconfig.get_path("purelib"))
    python = str(tmp_path / "env" / "bin" / "python")
    pip = (python, "-m", "pip", "--quiet", "--disable-pip-version-check", "install")
    run(*pip, "--no-index", "--no-deps", "--ignore-installed", wheel, cwd=tmp_path)

    shutil.copytree(ROOT / "tests", tmp_path / "tests")
    shutil.copy(ROOT / ".pytest.ini", tmp_path)
    command, variables = [python, "-m", "tests.ops.installed"], {"PYTHONPATH": str(tmp_path)}
    if has_sanitizers(tmp_path):
        assert b"__asan_report" in library and b"__ubsan_handle" in library
        command.append("ops")
        # Python itself is built without the sanitizers; their libraries have to be there first.
        preloaded = map(_library_of_gcc, ("libasan", "libubsan", "libstdc++"))
        variables |= {"LD_PRELOAD": " ".join(preloaded), "OMP_NUM_THREADS": "1"}
        variables["ASAN_OPTIONS"] = "detect_leaks=0"  # Python keeps memory to its end.
    said = run(*command, cwd=tmp_path, **variables)
    installed = re.search(r"^installed: (\S+) True$", said, re.MULTILINE)
    assert installed and wheel.name.startswith(f"layerzero-{installed[1]}-"), said
    if has_sanitizers(tmp_path):
        passed = re.search(r"(\d+) passed", said)
        assert passed is not None and int(passed[1]) > 150, said[-1000:]
        assert "skipped" not in said, "the kernels were loaded"
