"""Runs the numeric tests as on other processors: python -m tests.processors (make test-processors).

MKL, ATen and oneDNN choose kernels by the processor's instructions, and another kernel adds in
another order. Each has a variable that has it choose as on a smaller processor, so one machine can
stand for several. What a test that compares no numbers does is the same under all of them: so these
runs take the files that compare with a reference (`tests.harness.checks` and what is built on it).

MKL follows its variable on Intel's processors only. A setting beyond what this processor has
changes nothing; the line says so, by a hash of some operators' bits.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
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
WIDE = {
    "MKL_ENABLE_INSTRUCTIONS": "AVX512",
    "ATEN_CPU_CAPABILITY": "avx512",
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
}
SHORT = {"all old": OLD, "all wide": WIDE}
"""For `make test`: the two ends, all libraries at once."""
SHORT_FILES = ["test_grads.py", "test_clip.py", "test_mixed_precision.py"]
_NUMERIC = re.compile(r"tests\.harness\.(checks|compare|reference|optional_runs|twin_machine)\b")
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


def numeric_files() -> list[str]:
    folders = (REPOSITORY / "tests" / name for name in ("distributed", "integrations", "ops"))
    files = sorted(path for folder in folders for path in folder.glob("test_*.py"))
    return [str(path) for path in files if _NUMERIC.search(path.read_text())]


def run(setting: dict[str, str], files: list[str], options: list[str]) -> tuple[int, str]:
    """Exit code of pytest, and what it printed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **setting}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, *files]
    done = subprocess.run(
        command, env=environment, cwd=REPOSITORY, text=True, stdout=subprocess.PIPE, stderr=2
    )
    return done.returncode, done.stdout


def bits_under(setting: dict[str, str]) -> str:
    command = [sys.executable, "-c", _BITS]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **setting}
    return subprocess.check_output(command, env=environment, text=True).strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-n", default=str((os.cpu_count() or 1) + 1), help="workers of pytest")
    parser.add_argument("-k", default="", help="only settings whose name contains this")
    parser.add_argument("files", nargs="*", help="instead of all numeric tests")
    arguments = parser.parse_args()
    files, status, usual = arguments.files or numeric_files(), 0, bits_under({})
    for name, setting in SETTINGS.items():
        if arguments.k not in name:
            continue
        begin, bits = time.monotonic(), bits_under(setting)
        code, output = run(setting, files, ["-n", arguments.n, "--dist", "worksteal"])
        status |= code
        if code:
            print(output)
        same = "the usual bits" if bits == usual else "other bits"
        summary = output.strip().splitlines()[-1] if output.strip() else "nothing printed"
        print(f"{name:20} {same:15} {summary} in {time.monotonic() - begin:.0f} s", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
