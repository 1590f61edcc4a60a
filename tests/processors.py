"""Runs the numeric tests as on other processors: python -m tests.processors (make test-processors).

docs/internals/testing.md says how one machine stands for several. Files: of those that compare
numbers with a reference, one or two for each way in which the engine computes them (plain steps,
accumulation, layered modes, mixed precision, clipping, native optimizers, tensor parallelism,
experts, pipelines, recomputation, optional modules, compiled units, and the kernels of ops/). The
others repeat these ways, or compare no numbers.
"""

import argparse
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]


def _flags() -> set[str]:
    """Instruction sets of this processor, as Linux lists them; empty on other systems."""
    listed = Path("/proc/cpuinfo")
    lines = listed.read_text().splitlines() if listed.exists() else []
    return {flag for line in lines if line.startswith("flags") for flag in line.split()}


HAS_AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= _flags()
"""Told to use AVX-512 on a processor without it, MKL obeys, and dies of an illegal instruction."""
FILES = """
distributed: compile experts flat_optimizer grads layered
    mixed_precision norms optional_modules pipeline several_forwards tensor_parallel
    torch_optimizers whole_tensor
ops: flat_step pack sums
"""
SETTINGS: dict[str, dict[str, str]] = {
    "as it is": {},
    **{f"MKL {each}": {"MKL_ENABLE_INSTRUCTIONS": each} for each in ("SSE4_2", "AVX2", "AVX512")},
    **{f"ATen {each}": {"ATEN_CPU_CAPABILITY": each} for each in ("default", "avx2", "avx512")},
    **{f"oneDNN {each}": {"ONEDNN_MAX_CPU_ISA": each} for each in ("SSE41", "AVX2", "AVX512_CORE")},
}
OLD = {
    "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    "ATEN_CPU_CAPABILITY": "default",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
}
SHORT_TESTS = (
    "grads.py::test_every_toy_model_trains_bitwise_like_one_process[3-sgd_momentum]",
    "grads.py::test_every_toy_model_trains_bitwise_like_one_process[4-adamw]",
    "norms.py::test_norms_are_those_of_whole_tensors[1]",
)
"""Every model, steps that magnify a rounding, norms of every kind."""
_INTEL = "int mkl_serv_intel_cpu_true(void) { return 1; }\n"
_BITS = """
import hashlib, torch
torch.manual_seed(0)
digest = hashlib.sha256()
for n in (3, 16, 37, 129):
    a, b = torch.randn(n, n), torch.randn(n, n)
    for y in (a @ b, a.T @ b, (a * b).sum(), a.softmax(-1), a.exp(), a.bfloat16() @ b.bfloat16()):
        digest.update(y.float().contiguous().numpy().tobytes())
print(digest.hexdigest()[:8])
"""


def named_files(names: str) -> list[str]:
    """Paths of files as named in `FILES`."""
    found = []
    for folder, listed in re.findall(r"(\w+):([\w\s]+?)(?=\w+:|\Z)", names):
        found += [str(REPOSITORY / "tests" / folder / f"test_{each}.py") for each in listed.split()]
    return found


def as_intel(folder: Path) -> dict[str, str]:
    """A setting under which MKL takes this for a processor of Intel; empty where it is one, where
    there is no MKL (not x86-64), or no compiler."""
    if platform.machine() not in ("x86_64", "AMD64") or sys.platform != "linux":
        return {}
    if "GenuineIntel" in Path("/proc/cpuinfo").read_text():
        return {}
    source, library = folder / "intel.c", folder / "intel.so"
    source.write_text(_INTEL)
    try:
        subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    except (OSError, subprocess.CalledProcessError):
        return {}
    return {"LD_PRELOAD": str(library)}


def run(setting: Mapping[str, str], files: list[str], options: list[str]) -> tuple[int, str]:
    """Exit code of pytest, and what it printed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **setting}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, *files]
    done = subprocess.run(
        command,
        env=environment,
        cwd=REPOSITORY,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return done.returncode, done.stdout


def bits_under(setting: Mapping[str, str]) -> str:
    """A hash of what some operators compute."""
    command = [sys.executable, "-c", _BITS]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **setting}
    return subprocess.check_output(command, env=environment, text=True).strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-n", default=str((os.cpu_count() or 1) + 1), help="workers of pytest")
    parser.add_argument("-k", default="", help="only settings whose name contains this")
    arguments = parser.parse_args()
    files = named_files(FILES)
    status, usual = 0, bits_under({})
    with tempfile.TemporaryDirectory() as folder:
        intel = as_intel(Path(folder))
        for name, setting in SETTINGS.items():
            if arguments.k not in name:
                continue
            if "512" in name and not HAS_AVX512:
                print(f"{name:20} not run: this processor has no AVX-512", flush=True)
                continue
            setting = {**setting, **intel} if name.startswith("MKL") else setting
            begin, bits = time.monotonic(), bits_under(setting)
            code, output = run(setting, files, ["-n", arguments.n, "--dist", "worksteal"])
            status |= code
            if code:
                print(output)
            same = "the usual bits" if bits == usual else "other bits"
            line, took = output.strip().splitlines()[-1], time.monotonic() - begin
            print(f"{name:20} {same:15} {line} ({took:.0f} s)", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
