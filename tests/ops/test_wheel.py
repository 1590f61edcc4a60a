"""The wheel and the source distribution install in an empty environment and train a step there; the
wheel's kernels run all tests of the ops under the address and undefined-behaviour sanitizers."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from tests.harness.processes import call_alone
from tests.ops.test_cuda_emulation import has_sanitizers

pytestmark = [
    pytest.mark.slow,  # each makes an environment, and most compile
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ on this machine"),
]

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
    import setuptools
    from setuptools import build_meta

    # Where it appended the packages that it brings, before the fork.
    sys.path.append(str(Path(setuptools.__file__).parent / "_vendor"))
    getattr(build_meta, hook)(str(target))


def build(hook: str, source: Path, target: Path, **environment: str) -> str:
    done = call_alone(_build, hook, target, cwd=source, environment=environment, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a source distribution of this checkout, a wheel built from it, what the build
    said, and `source`, where it was built."""
    top = tmp_path_factory.mktemp("distributions")
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
    next(dist.glob("*/")).rename(dist / "source")
    said = build("build_wheel", dist / "source", dist, LAYERZERO_BUILD_EXT="", **tools)
    (dist / "build.log").write_text(said)
    return dist


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
    run(*pip, *options, distribution, cwd=distribution.parent, **variables)


def run_installed(python: str, folder: Path, *arguments: object, **environment: str) -> str:
    """What tests/ops/installed.py prints, from a folder with the tests and without the package."""
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / ".pytest.ini", folder)
    command = (python, "-m", "tests.ops.installed", *arguments)
    return run(*command, cwd=folder, PYTHONPATH=str(folder), OMP_NUM_THREADS="1", **environment)


@pytest.mark.slow
def test_a_wheel_installs_with_its_kernels(distributions: Path, tmp_path: Path) -> None:
    (wheel,) = distributions.glob("*.whl")
    assert "-cp310-abi3-" in wheel.name, "one wheel for all versions of Python"
    python = environment(tmp_path / "env")
    install(python, wheel)
    if has_sanitizers(tmp_path):
        said = run_installed(
            python,
            tmp_path,
            library_that_writes_out_of_bounds(distributions / "source"),
            # Python itself is built without the sanitizers; their libraries have to be there first.
            LD_PRELOAD=" ".join(map(library_of_gcc, ("libasan", "libubsan", "libstdc++"))),
            # Python keeps memory to its end; pytest would swallow a report.
            ASAN_OPTIONS=f"detect_leaks=0:log_path={tmp_path}/report",
        )
        passed = re.search(r"(\d+) passed", said)
        assert passed is not None and int(passed[1]) > 300, said[-1000:]
        assert "skipped" not in said, "the kernels were loaded"
        reports = [path.read_text() for path in tmp_path.glob("report*")]
        assert "AddressSanitizer" in "".join(reports), said[-1000:]
        assert re.search(r"with the broken library: [1-9]", said), said[-1000:]
    else:
        said = run_installed(python, tmp_path)
    installed = re.search(r"^installed: (\S+) True$", said, re.MULTILINE)
    assert installed and wheel.name.startswith(f"layerzero-{installed[1]}-"), said


def library_that_writes_out_of_bounds(source: Path) -> Path:
    """The wheel's library, but for one check of delta.cpp."""
    from torch.utils.cpp_extension import include_paths, library_paths

    delta = source / "csrc" / "delta.cpp"
    before = delta.read_text()
    delta.write_text(before.replace("job.capacity - out.count >= kBlock + kUsual", "true"))
    assert delta.read_text() != before
    target = re.search(r"-DTORCH_TARGET_VERSION=\w+", (source / "setup.py").read_text())
    assert target is not None
    objects = {path.stem: path for path in source.glob("build/temp*/csrc/*.o")}
    del objects["pack_cuda"]  # For CUDA, which is not built.
    flags = ["-std=c++17", "-O0", "-g1", "-fPIC", "-fvisibility=hidden", *SANITIZERS.split()]
    includes = [f"-isystem{path}" for path in include_paths()]
    run("g++", *flags, target[0], *includes, "-c", delta, "-o", objects["delta"], cwd=source)
    library = source / "broken.so"
    paths = [f"-L{path}" for path in library_paths()]
    run(
        *("g++", *flags, "-shared", *objects.values(), *paths, "-ltorch_cpu", "-o", library),
        cwd=source,
    )
    return library


def library_of_gcc(name: str) -> str:
    return run("g++", f"-print-file-name={name}.so", cwd=ROOT).strip()


def test_a_broken_nvcc_leaves_the_cpu_kernels(distributions: Path) -> None:
    said = (distributions / "build.log").read_text()
    (line,) = [line for line in said.splitlines() if line.startswith("layerzero:")]
    assert "the CUDA part is not built" in line
    assert not re.search(r"csrc\S*: warning:", said)
    (wheel,) = distributions.glob("*.whl")
    library = zipfile.ZipFile(wheel).read("layerzero/_C.abi3.so")
    assert b"layerzero_force_baseline" in library
    assert b"layerzero_finds_current_stream" not in library


@pytest.mark.slow
def test_a_source_distribution_installs_without_a_compiler(
    distributions: Path, tmp_path: Path
) -> None:
    (source,) = distributions.glob("*.tar.gz")
    python = environment(tmp_path / "env")
    install(python, source, CC="no-such-compiler", CXX="no-such-compiler", LAYERZERO_BUILD_EXT="")
    (said,) = run_installed(python, tmp_path).splitlines()
    assert said == f"installed: {source.name.removeprefix('layerzero-')[: -len('.tar.gz')]} False"
