"""The CUDA kernels' bodies, every thread of them run on the CPU under the address sanitizer."""

import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "csrc"
BUILD = SOURCES.parent / "build" / "emulation"
PROGRAM = Path(__file__).with_name("emulate.cpp")
STEP_PROGRAM = Path(__file__).with_name("emulate_step.cpp")

# Without optimization: the compiler, not the run, takes the time.
COMPILE = (
    *("g++", "-std=c++17", "-O0", "-g1", "-Wall", "-Wextra", "-Werror"),
    # Words are read where 16-bit elements lie, which on the device is fine.
    "-fno-strict-aliasing",
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
)


def has_sanitizers(folder: Path) -> bool:
    """Whether g++ is there and has them; leaves files in `folder`."""
    if shutil.which("g++") is None:
        return False
    probe = folder / "probe.cpp"
    probe.write_text("int main() { return 0; }\n")
    command = ["g++", "-fsanitize=address,undefined", str(probe), "-o", str(folder / "probe")]
    return not subprocess.run(command, capture_output=True).returncode


@pytest.fixture
def sanitizers(tmp_path: Path) -> None:
    if not has_sanitizers(tmp_path):
        pytest.skip("no g++ with sanitizers on this machine")


def build(source: Path) -> Path:
    """The program; kept for the next run of the tests with these sources, flags and compiler."""
    digest = hashlib.sha256(repr(COMPILE).encode())
    digest.update(subprocess.check_output(["g++", "--version"]))
    for path in (source, *sorted(path for path in SOURCES.rglob("*") if path.is_file())):
        digest.update(path.read_bytes())
    program = BUILD / f"{source.stem}-{digest.hexdigest()[:16]}"
    if not program.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        for outdated in BUILD.glob(f"{source.stem}-*"):
            outdated.unlink(missing_ok=True)
        unfinished = program.with_name(f"{program.name}.{os.getpid()}")
        compiled = subprocess.run(
            [*COMPILE, f"-I{SOURCES / 'cuda'}", str(source), "-o", str(unfinished)],
            capture_output=True,
            text=True,
        )
        assert compiled.returncode == 0, compiled.stderr
        unfinished.replace(program)
    return program


@pytest.mark.slow
@pytest.mark.usefixtures("sanitizers")
@pytest.mark.parametrize(
    ("program", "counted", "least"),
    [
        (PROGRAM, r"emulated (\d+) launches, checked (\d+) elements", (1000, 1_000_000)),
        # Segments: those in wide accesses.
        (
            STEP_PROGRAM,
            r"(\d+) launches, checked (\d+) elements, (\d+) segments",
            (100, 1_000_000, 500),
        ),
    ],
    ids=["kernels", "a step"],
)
def test_every_thread_stays_in_bounds_and_is_right(
    program: Path, counted: str, least: tuple[int, ...]
) -> None:
    done = subprocess.run([str(build(program))], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = re.search(counted, done.stdout)
    assert counts, done.stdout
    assert all(int(count) > few for count, few in zip(counts.groups(), least, strict=True))
