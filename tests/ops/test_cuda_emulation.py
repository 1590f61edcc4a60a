"""The CUDA kernels' bodies, every thread of them run on the CPU under the address sanitizer."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "csrc"
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


@pytest.mark.slow
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
    program: Path, counted: str, least: tuple[int, ...], tmp_path: Path
) -> None:
    if not has_sanitizers(tmp_path):
        pytest.skip("no g++ with sanitizers on this machine")
    built = tmp_path / "program"
    command = [*COMPILE, f"-I{SOURCES / 'cuda'}", str(program), "-o", str(built)]
    compiled = subprocess.run(command, capture_output=True, text=True)
    assert compiled.returncode == 0, compiled.stderr
    done = subprocess.run([str(built)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = re.search(counted, done.stdout)
    assert counts, done.stdout
    assert all(int(count) > few for count, few in zip(counts.groups(), least, strict=True))
