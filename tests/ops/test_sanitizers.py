"""The native extension under the address and undefined-behaviour sanitizers, with all op tests.

The tests run in a folder of their own, with a copy of the package and another build of `csrc`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.utils.cpp_extension import include_paths, library_paths

from tests.ops.test_cuda_emulation import sanitizers

__all__ = ["sanitizers"]

ROOT = Path(__file__).parents[2]
TARGET = re.search(r"-DTORCH_TARGET_VERSION=\w+", (ROOT / "setup.py").read_text())
FLAGS = (
    # Not optimized: compiling takes longer than what the tests would gain.
    *("-std=c++17", "-O0", "-g1", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off"),
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
)
OPS = ("checked", "crc32", "find_changed", "flat_step", "ordered_sum", "pack", "word_sums")


def build(folder: Path, changed: tuple[str, str, str] | None = None) -> None:
    """Build `csrc` into the package in `folder`, with a text replaced in one source."""
    assert TARGET is not None
    sources = [path for path in (folder / "csrc").glob("*.cpp") if path.stem != "pack_cuda"]
    if changed is not None:
        path = folder / "csrc" / changed[0]
        before = path.read_text()
        path.write_text(before.replace(*changed[1:]))
        assert path.read_text() != before
        sources = [path]

    def compile_one(source: Path) -> None:
        includes = [f"-isystem{path}" for path in include_paths()]
        run("g++", *FLAGS, TARGET[0], *includes, "-c", source, "-o", source.with_suffix(".o"))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, sources))
    objects = sorted((folder / "csrc").glob("*.o"))
    paths = [f"-L{path}" for path in library_paths()]
    library = folder / "layerzero" / "_C.abi3.so"
    run("g++", *FLAGS, "-shared", *objects, *paths, "-ltorch_cpu", "-o", library)


def run(*command: object) -> None:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def run_op_tests(folder: Path, *names: str) -> subprocess.CompletedProcess[str]:
    libraries = [
        subprocess.run(
            ["g++", f"-print-file-name={name}.so"], capture_output=True, text=True, check=True
        ).stdout.strip()
        # Python itself is built without the sanitizers; their libraries have to be there first.
        for name in ("libasan", "libubsan", "libstdc++")
    ]
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(libraries),
        # Python keeps memory to its end; pytest would swallow a report.
        "ASAN_OPTIONS": f"detect_leaks=0:log_path={folder}/report",
        "PYTHONPATH": str(folder),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *names]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.usefixtures("sanitizers")
def test_all_ops_run_clean_and_a_write_out_of_bounds_is_found(tmp_path: Path) -> None:
    for name in ("layerzero", "tests", "csrc"):
        ignored = shutil.ignore_patterns("_C*", "__pycache__")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    shutil.copy(ROOT / ".pytest.ini", tmp_path)
    build(tmp_path)
    files = (f"tests/ops/test_{name}.py" for name in OPS)
    # These call no kernel, or only register it.
    done = run_op_tests(tmp_path, *files, "-k", "not (reference or compiled or opcheck)")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) > 300, done.stdout[-1000:]
    assert "skipped" not in done.stdout, "the kernels were loaded"

    build(tmp_path, ("delta.cpp", "job.capacity - out.count >= kBlock + kUsual", "true"))
    done = run_op_tests(tmp_path, "tests/ops/test_find_changed.py", "-k", "any_density")
    reports = [path.read_text() for path in tmp_path.glob("report*")]
    assert done.returncode != 0 and "AddressSanitizer" in "".join(reports)
