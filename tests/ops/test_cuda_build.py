"""The CUDA kernels compile for every architecture without spills, link, and load without a GPU."""

import ctypes
import re
import shutil
import subprocess
from operator import le
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "csrc" / "cuda"
ARCHITECTURES = ("80", "90", "100")
ONE_OF_THEM = ("100",)
"""Each takes 7 s. An install for the CPU compiles for another."""

NUM_PAIRS = 4**2  # of dtypes
NUM_WINDOWS = 2
# Of float32 and bfloat16, each with states in three dtypes; and two that look everything up, for
# float32 and float64.
NUM_OWN_STEPS = 2 * 3
NUM_STEPS = NUM_OWN_STEPS + 2
MAX_REGISTERS = {"11pack_kernel": 64, "18ordered_sum_kernel": 64}
"""Of a step's: 80, three blocks on a multiprocessor, which its loads of many elements at once fill;
128 and 255 where it looks everything up."""

INVALID_VALUE = 1  # cudaErrorInvalidValue
FLOAT32, UNKNOWN_DTYPE = 0, 4


@pytest.fixture
def nvcc() -> str:
    found = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if found is None:
        pytest.skip("no nvcc on this machine")
    known = subprocess.run([found, "--list-gpu-code"], capture_output=True, text=True).stdout
    missing = [f"sm_{a}" for a in ARCHITECTURES if f"sm_{a}" not in known.split()]
    if missing:
        pytest.skip(f"nvcc is too old for {', '.join(missing)}")
    return found


def compile_and_link(nvcc: str, folder: Path, archs: tuple[str, ...]) -> tuple[Path, str]:
    """The library, and what ptxas says."""
    library = folder / "layerzero_cuda.so"
    targets = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in archs]
    done = subprocess.run(
        [
            *(
                nvcc,
                "-O3",
                "-std=c++17",
                "-shared",
                "-cudart",
                "static",
                "-Xcompiler",
                "-fPIC,-Wall",
            ),
            *(*targets, "--threads", "2", "-Xptxas", "-v"),
            *("-o", str(library), *map(str, sorted(SOURCES.glob("*.cu")))),
        ],
        capture_output=True,
        text=True,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "warning" not in said.lower(), said
    return library, said


def check_resources(said: str, archs: tuple[str, ...]) -> None:
    # Two threads of nvcc may mix their lines, so each kind of line is counted by itself.
    kernels = re.findall(r"Compiling entry function '(\S+)' for 'sm_(\d+)'", said)
    counts = {"11pack_kernel": NUM_PAIRS * NUM_WINDOWS, "18ordered_sum_kernel": NUM_PAIRS}
    counts["11step_kernel"] = NUM_STEPS
    for arch in archs:
        names = [name for name, of in kernels if of == arch]
        found = {kernel: sum(kernel in name for name in names) for kernel in counts}
        assert found == counts and len(names) == sum(counts.values())
    frames = re.findall(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", said
    )
    registers = sorted(int(count) for count in re.findall(r"Used (\d+) registers", said))
    assert len(frames) == len(registers) == len(kernels)
    assert set(frames) == {("0", "0", "0")}
    limits = [MAX_REGISTERS[of] for of in MAX_REGISTERS for name, _ in kernels if of in name]
    limits += [*([80] * NUM_OWN_STEPS), 128, 255] * len(archs)
    assert all(map(le, registers, sorted(limits)))


def check_library(path: Path) -> None:
    library = ctypes.CDLL(str(path))
    launches = library.layerzero_cuda_launches
    launches.argtypes = [ctypes.c_int64]
    numbers = {0: 1, 1: 1, 33: 1, 449: 1, 2000: 1, 2040: 1, 2041: 2, 4001: 2, 10_000: 5}
    assert {count: launches(count) for count in numbers} == numbers
    library.layerzero_cuda_error.restype = ctypes.c_char_p
    assert library.layerzero_cuda_error(0) == b"no error"
    assert library.layerzero_cuda_error(INVALID_VALUE) == b"invalid argument"
    pointers = (ctypes.c_void_p * 2)(256, 512)
    numels = (ctypes.c_int64 * 2)(3, 4)

    def pack(out=256, out_dtype=FLOAT32, numel=8, num_srcs=2, src_dtype=FLOAT32, num_segs=0) -> int:
        # Without rows nothing is read or written, even where there is a GPU.
        return library.layerzero_cuda_pack(
            *(ctypes.c_void_p(out), ctypes.c_int(out_dtype), ctypes.c_int64(numel)),
            *(pointers, numels, ctypes.c_int64(num_srcs), ctypes.c_int(src_dtype)),
            *(None, ctypes.c_int64(num_segs), ctypes.c_float(1), None),
        )

    def ordered_sum(out=256, out_dtype=FLOAT32, numel=8, num_parts=2, part_dtype=FLOAT32) -> int:
        return library.layerzero_cuda_ordered_sum(
            *(ctypes.c_void_p(out), ctypes.c_int(out_dtype), ctypes.c_int64(numel)),
            *(pointers, ctypes.c_int64(num_parts), ctypes.c_int(part_dtype)),
            *(ctypes.c_double(1), None),
        )

    def step(numel=0, num_ranges=0) -> int:
        # Without ranges nothing is read or written. Of `StepInput`: 9 pointers and two numbers,
        # then its rows and how many.
        rows = (ctypes.c_double * 11)()
        address = ctypes.cast(rows, ctypes.c_void_p).value
        inputs = (ctypes.c_int64 * 13)(*[0] * 9, numel, num_ranges, address, 1)
        return library.layerzero_cuda_step((ctypes.c_int64 * 8)(), inputs, ctypes.c_int64(1), None)

    assert step() == step(numel=1 << 20) == 0
    assert step(numel=1 << 50, num_ranges=1) == INVALID_VALUE

    for call in (pack, ordered_sum):
        assert call(numel=0) == 0
        assert call(out=None) == INVALID_VALUE
        assert call(numel=-1) == INVALID_VALUE
        assert call(numel=1 << 62) == INVALID_VALUE
        assert call(out_dtype=UNKNOWN_DTYPE) == INVALID_VALUE
    assert pack(src_dtype=UNKNOWN_DTYPE) == INVALID_VALUE
    assert pack(num_srcs=-1) == INVALID_VALUE
    assert pack(num_segs=2) == INVALID_VALUE, "rows, but no pointer to them"
    assert ordered_sum(part_dtype=UNKNOWN_DTYPE) == INVALID_VALUE
    assert ordered_sum(num_parts=-1) == INVALID_VALUE
    assert ordered_sum(num_parts=4001) == INVALID_VALUE
    if has_driver():
        return
    for code in (pack(), ordered_sum(), step(1, 1)):
        assert code not in (0, INVALID_VALUE)
        assert library.layerzero_cuda_error(code) not in (b"no error", b"unrecognized error code")


def has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


@pytest.mark.slow
def test_kernels_compile_without_spills_for_all_architectures_and_load(
    nvcc: str, in_full: bool, tmp_path: Path
) -> None:
    # One test, because xdist would build once for each.
    archs = ARCHITECTURES if in_full else ONE_OF_THEM
    library, said = compile_and_link(nvcc, tmp_path, archs)
    check_resources(said, archs)
    check_library(library)
