"""The first run on a GPU: `make gpu-check` (is it right?) and `make gpu-bench` (is it fast?).

Runs steps one after the other, each in a process that is killed when its time is over, and writes
what was measured beside what was expected, as Markdown and as JSON. Where something is off it names
the finding to suspect (docs/howto/first_gpu_run.md). Exit status: 0, all is as expected; 1, not;
2, there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.gpu_expected import EXPECTED, FIRST_RUN, PROFILE, STREAMS
from tests.gpu.process import (
    REFUSED,
    REPOSITORY,
    ProcessFailed,
    find_program,
    in_process,
    run_command,
)

MINUTES = 9.0
"""For all steps of a command together."""
BUILD = REPOSITORY / "build" / "gpu"
PACK_PAGE = "docs/internals/pad_copy.md"
SANITIZED = (
    "test_missing_sources_gaps_and_the_tail_become_zeros or test_rows_that_are_nonsense or "
    "test_the_sum_may_replace_one_of_its_parts or test_any_number_of_sources_packs[449] or "
    "test_any_number_of_sources_packs[4001]"
)
_OUTPUT_CHARS = 3000


@dataclass(frozen=True)
class Outcome:
    """What one step gave."""

    name: str
    status: str
    """"ok", "off" (it ran, and is not as expected), "failed", "killed" or "not run"."""
    measured: list[str] = field(default_factory=list)
    expected: list[str] = field(default_factory=list)
    suspects: list[str] = field(default_factory=list)
    """Findings with their pages, where the status is neither "ok" nor "not run"."""
    seconds: float = 0.0
    output: str = ""
    """The end of what it printed, where it is not ok."""
    data: dict[str, Any] = field(default_factory=dict)

    @property
    def is_fine(self) -> bool:
        return self.status in ("ok", "not run")


@dataclass(frozen=True)
class Step:
    """A command with a time limit, and a function that reads what it gave."""

    name: str
    expects: str
    suspect: str
    command: Sequence[str]
    limit_s: float
    read: Callable[[Step, int, str, Path], Outcome]
    env: dict[str, str] = field(default_factory=dict)
    needs: str | None = None
    """A program without which the step is not run."""

    def run(self, limit_s: float, folder: Path) -> Outcome:
        """Run it; `folder` is its own, and the command may name it as {folder}."""
        if self.needs is not None and find_program(self.needs) is None:
            return Outcome(self.name, "not run", [f"no {self.needs} on this machine"])
        command = [part.replace("{folder}", str(folder)) for part in self.command]
        if self.needs is not None and command[0] == self.needs:
            command[0] = str(find_program(self.needs))
        began = time.monotonic()
        code, output = run_command(command, limit_s, self.env)
        seconds = time.monotonic() - began
        if code is None:
            outcome = Outcome(self.name, "killed", [f"not done after {limit_s:.0f} s"])
        else:
            outcome = self.read(self, code, output, folder)
        return self._completed(outcome, seconds, output)

    def _completed(self, outcome: Outcome, seconds: float, output: str) -> Outcome:
        is_off = not outcome.is_fine
        suspects = outcome.suspects or ([self.suspect] if is_off else [])
        return Outcome(
            outcome.name,
            outcome.status,
            outcome.measured,
            outcome.expected or [self.expects],
            suspects,
            round(seconds, 1),
            output[-_OUTPUT_CHARS:] if is_off else "",
            outcome.data,
        )


# Reading --------------------------------------------------------------------------------------


def read_tests(step: Step, code: int, output: str, folder: Path) -> Outcome:
    """Of pytest, which wrote {folder}/tests.xml."""
    report = folder / "tests.xml"
    if not report.exists():
        return Outcome(step.name, "failed", [f"pytest ended with exit status {code}"])
    passed, failed, skipped = [], [], []
    for case in ElementTree.parse(report).iter("testcase"):
        name = str(case.get("name"))
        problem = case.find("failure") if case.find("failure") is not None else case.find("error")
        if problem is not None:
            first = (problem.get("message") or "").strip().splitlines()[:1]
            failed.append(f"{name}: {' '.join(first)[:200]}")
        elif (skip := case.find("skipped")) is not None:
            skipped.append(f"{name}: {skip.get('message')}")
        else:
            passed.append(name)
    measured = [f"{len(passed)} passed, {len(failed)} failed, {len(skipped)} skipped", *failed]
    status = "ok" if code == 0 and passed else "failed"
    if code == 0 and skipped and not passed and all(REFUSED in each for each in skipped):
        status = "not run"
    data = {"passed": passed, "failed": failed, "skipped": skipped}
    return Outcome(step.name, status, measured, data=data)


def read_sanitizer(step: Step, code: int, output: str, folder: Path) -> Outcome:
    """Of compute-sanitizer around pytest; a driver may refuse the tool."""
    if "Device not supported" in output or "Unable to find injection" in output:
        return Outcome(step.name, "not run", ["compute-sanitizer refuses this device"])
    outcome = read_tests(step, code, output, folder)
    found = [line for line in output.splitlines() if "ERROR SUMMARY" in line or "Invalid" in line]
    return Outcome(step.name, outcome.status, [*outcome.measured, *found[:5]], data=outcome.data)


def read_measures(step: Step, code: int, output: str, folder: Path) -> Outcome:
    """Of a benchmark whose last line is JSON with "measures"."""
    result = _last_json(output)
    if code != 0 or result is None:
        return Outcome(step.name, "failed", [f"exit status {code}"])
    return judge(step.name, result.get("measures", {}), result)


def read_pad_copy(step: Step, code: int, output: str, folder: Path) -> Outcome:
    """Of bench_pad_copy: the cast of a layer."""
    result = _last_json(output)
    cases = {} if result is None else {each["case"]: each for each in result["cases"]}
    cast = cases.get("flatten L float32 -> bfloat16")
    if code != 0 or cast is None:
        return Outcome(step.name, "failed", [f"exit status {code}"])
    measures = {"pack_over_copy": cast["memcpy_ratio_spread"]["median"]}
    return judge(step.name, measures, result or {})


def judge(name: str, measures: dict[str, float], data: dict[str, Any]) -> Outcome:
    """Each measure beside what is expected of it; on a CPU nothing is expected."""
    on_gpu = str(data.get("config", data).get("device", "")).startswith("cuda")
    rows, expected, suspects = [], [], []
    for measure, value in measures.items():
        wanted = EXPECTED[measure]
        is_off = on_gpu and not wanted.holds(value)
        rows.append(f"{'OFF: ' if is_off else ''}{wanted.what}: {value:.4g} {wanted.unit}".strip())
        expected.append(f"{wanted.text} ({wanted.source})" if on_gpu else "a GPU's; this is a CPU")
        if is_off:
            suspects.append(wanted.suspect)
    rows += data.get("details", {}).get("failures", [])
    status = "off" if suspects else "ok"
    return Outcome(
        name, status, rows or ["ran"], expected, list(dict.fromkeys(suspects)), data=data
    )


def _last_json(output: str) -> dict[str, Any] | None:
    for line in reversed(output.splitlines()):
        if line.startswith("{"):
            try:
                value: dict[str, Any] = json.loads(line)
            except ValueError:
                return None
            return value
    return None


# Steps ----------------------------------------------------------------------------------------


def _pytest(*args: str) -> list[str]:
    options = [
        "-q",
        "--slow",
        "--tb=short",
        "-p",
        "no:cacheprovider",
        "--junitxml={folder}/tests.xml",
    ]
    return [sys.executable, "-m", "pytest", *options, *args]


def _tests(name: str, limit_s: float, expects: str, suspect: str, *args: str) -> Step:
    return Step(name, expects, suspect, _pytest(*args), limit_s, read_tests)


def _sanitized(tool: str) -> Step:
    flags = ["--tool", tool, "--error-exitcode", "9", "--target-processes", "all"]
    return Step(
        f"packing under {tool}",
        "0 errors",
        f"finding 3, {PACK_PAGE}",
        ["compute-sanitizer", *flags, *_pytest("tests/gpu/test_pack.py", "-k", SANITIZED)],
        100,
        read_sanitizer,
        # The sanitizer does not see past the end of a tensor inside a larger cached segment.
        {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        "compute-sanitizer",
    )


def check_steps(on_cpu: bool) -> list[Step]:
    """The steps of `make gpu-check`, the most telling first."""
    if on_cpu:
        return [
            _tests(
                "the mirror, and what a CPU can run of the rest",
                240,
                "nothing differs from the replica",
                FIRST_RUN,
                "tests/distributed/test_mirror.py",
            )
        ]
    pack, mirror = "tests/gpu/test_pack.py", "tests/gpu/test_mirror.py"
    return [
        _tests(
            "values on any rank of any world",
            240,
            "nothing differs from the replica, with and without delays",
            f"finding 2 (late streams), or 13 if only without delays, {STREAMS}",
            *(mirror, "-k", "trains_like"),
        ),
        _tests(
            "missing waits are seen",
            110,
            "each gives wrong values: else the step before proves little",
            f"finding 10, {STREAMS}",
            *(mirror, "-k", "missing"),
        ),
        _tests(
            "memory leaves its pool",
            180,
            "nothing differs, no illegal access; no cudaMalloc in a steady step",
            f"finding 1, {STREAMS}",
            *("tests/gpu/test_memory.py", "-k", "not sanitizer"),
        ),
        _tests(
            "packing kernels",
            150,
            "the bits of plain torch; 0.9 of a copy's bandwidth",
            f"finding 3, {PACK_PAGE}",
            pack,
        ),
        _tests(
            "the host never blocks",
            90,
            "the stream is busy when the step returns",
            f"finding 3, {PROFILE}",
            "tests/gpu/test_no_host_block.py",
        ),
        _tests(
            "NCCL alone",
            120,
            "values; no work on the current stream; abort returns; a stuck stream is reported",
            f"findings 4 and 6, {STREAMS}",
            "tests/gpu/test_nccl_alone.py",
        ),
        _sanitized("memcheck"),
        Step(
            "use after free in stream order, under memcheck",
            "0 errors",
            f"finding 1, {STREAMS}",
            _pytest("tests/gpu/test_memory.py", "-k", "sanitizer"),
            160,
            read_tests,
            needs="compute-sanitizer",
        ),
        _sanitized("initcheck"),
        _tests(
            "two ranks of NCCL on one GPU",
            100,
            "the bits of plain training; NCCL does not support it, and may refuse",
            f"finding 6, {STREAMS}",
            "tests/gpu/test_two_ranks.py",
        ),
    ]


def bench_steps(on_cpu: bool, out: Path) -> list[Step]:
    """The steps of `make gpu-bench`."""

    def part(name: str, limit_s: float, *args: str) -> Step:
        flags = ["--cpu", "--rounds", "1"] if on_cpu else []
        command = [sys.executable, "-m", "benchmarks.bench_gpu_step", "--part", name, *args, *flags]
        title = " ".join(["bench_gpu_step", name, *args[:2]])
        return Step(title, "", FIRST_RUN, command, limit_s, read_measures)

    trace = str(out / "gpu_trace.json.gz")
    pad_copy = Step(
        "bench_pad_copy",
        "",
        f"finding 3, {PACK_PAGE}",
        [sys.executable, "benchmarks/bench_pad_copy.py", "--only", "L float32 -> bfloat16"],
        90,
        read_pad_copy,
    )
    return [
        part("ceilings", 60),
        part("step", 110, "--world", "8"),
        part("trace", 110, "--world", "8", "--trace", trace),
        part("memory", 70, "--world", "8"),
        part("host", 80, "--world", "8"),
        part("step", 110, "--world", "64"),
        part("memory", 70, "--world", "64"),
        *([] if on_cpu else [pad_copy]),
    ]


# The machine ----------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """What a result was measured on. Runs in a process of its own: it makes a context."""
    import torch

    from benchmarks.common import environment
    from layerzero.ops import native_status

    found: dict[str, Any] = {**environment(), "host": platform.platform(), "cuda": None}
    found["kernels"] = asdict(native_status())
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "gpus": torch.cuda.device_count(),
            "capability": f"{properties.major}{properties.minor}",
            "memory_gb": round(properties.total_memory / 1e9, 1),
            "driver": _ask("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        }
    nvcc = find_program("nvcc")
    found["nvcc"] = None if nvcc is None else _ask(nvcc, "--version").splitlines()[-1:]
    return found


def _ask(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({error})"
    return done.stdout.strip()


def build_kernels(capability: str, limit_s: float) -> tuple[int | None, str]:
    """Build the native library in place, for this GPU alone."""
    env = {"LAYERZERO_BUILD_EXT": "1", "LAYERZERO_CUDA_ARCHS": capability}
    return run_command([sys.executable, "setup.py", "build_ext", "--inplace"], limit_s, env)


def prepare(on_cpu: bool) -> tuple[dict[str, Any], Outcome]:
    """Describe the machine, and build the kernels where they are missing and can be built."""
    began, name, output = time.monotonic(), "machine and kernels", ""
    found = in_process("tests.gpu.day:machine", timeout=120)
    kernels = found["kernels"]
    if not on_cpu and found["cuda"] and not kernels["cuda"] and found["nvcc"]:
        code, output = build_kernels(found["capability"], 200)
        output = f"exit status {code}\n{output}"
        found = in_process("tests.gpu.day:machine", timeout=120)
        kernels = found["kernels"]
    is_fine = on_cpu or kernels["cuda"]
    return found, Outcome(
        name,
        "ok" if is_fine else "off",
        [f"native {kernels['native']}, CUDA {kernels['cuda']} {kernels['reason']}".strip()],
        ["built for this GPU, and loaded"] if not on_cpu else ["a GPU's; this is a CPU"],
        [] if is_fine else [f"finding 3, {PACK_PAGE}"],
        round(time.monotonic() - began, 1),
        "" if is_fine else output[-_OUTPUT_CHARS:],
    )


# Running and writing --------------------------------------------------------------------------


def run_steps(steps: Sequence[Step], deadline: float) -> list[Outcome]:
    """Run each within its limit, and all before `deadline` (of `time.monotonic`)."""
    outcomes = []
    for step in steps:
        left = deadline - time.monotonic()
        if left < 5:
            outcome = Outcome(step.name, "killed", ["no time was left for it"], [step.expects])
        else:
            print(f"... {step.name}", flush=True)
            with tempfile.TemporaryDirectory(prefix="day-") as folder:
                outcome = step.run(min(step.limit_s, left), Path(folder))
        print(_line(outcome), flush=True)
        outcomes.append(outcome)
    return outcomes


def _line(outcome: Outcome) -> str:
    lines = [f"{outcome.status:8}{outcome.name} ({outcome.seconds:.0f} s)"]
    lines += [f"        {row}" for row in outcome.measured]
    lines += [f"        suspect {suspect}" for suspect in outcome.suspects]
    return "\n".join(lines)


def markdown(what: str, on: dict[str, Any], outcomes: Sequence[Outcome]) -> str:
    """The result as a page."""
    lines = [f"# make gpu-{what}", ""]
    lines += [f"- {name}: {value}" for name, value in on.items()]
    lines += [
        "",
        "| step | status | s | measured | expected | suspect |",
        "|---|---|---|---|---|---|",
    ]
    for each in outcomes:
        cells = [each.name, each.status, f"{each.seconds:.0f}"]
        cells += ["<br>".join(rows) for rows in (each.measured, each.expected, each.suspects)]
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    for each in outcomes:
        if each.output:
            lines += ["", f"## {each.name}: the end of its output", "", "```", each.output, "```"]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["check", "bench"])
    parser.add_argument("--cpu", action="store_true", help="run the branches that need no GPU")
    parser.add_argument("--out", type=Path, default=BUILD, help="folder of the results")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for all steps together")
    parser.add_argument("--only", default="", help="steps whose name contains this")
    args = parser.parse_args(arguments)
    deadline = time.monotonic() + 60 * args.minutes
    try:
        on, first = prepare(args.cpu)
    except ProcessFailed as error:
        print(f"torch or layerzero cannot be imported here:\n{error}")
        return 1
    if not args.cpu and on["cuda"] is None:
        print(f"no GPU: make gpu-{args.what} needs one; ARGS=--cpu runs what a CPU can")
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    print(_line(first), flush=True)
    steps = check_steps(args.cpu) if args.what == "check" else bench_steps(args.cpu, args.out)
    chosen = [step for step in steps if args.only in step.name]
    outcomes = [first, *run_steps(chosen, deadline)]
    page = args.out / f"gpu_{args.what}.md"
    page.write_text(markdown(args.what, on, outcomes))
    result = {"command": args.what, "machine": on, "steps": [asdict(each) for each in outcomes]}
    page.with_suffix(".json").write_text(json.dumps(result, indent=1))
    is_fine = all(each.is_fine for each in outcomes)
    verdict = "not all is as expected"
    if is_fine:
        verdict = "all ran; of a CPU nothing is expected" if args.cpu else "all is as expected"
    print(f"{verdict}: {os.path.relpath(page)} and .json")
    return 0 if is_fine else 1


if __name__ == "__main__":
    sys.exit(main())
