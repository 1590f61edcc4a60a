"""One command on a GPU: `make gpu`. Is it right, and is it fast, in six minutes?

What is right is checked side by side, as nothing of that is timed; then benchmarks run alone, the
most telling first. Each step is a process that is killed when its time is over. After each, what
was measured is written beside what was expected, as Markdown and as JSON, also into the folder that
the variable OUT names. Exit status: 0, all is as expected; 1, not; 2, there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.gpu_expected import EXPECTED, FIRST_RUN, PACK, PROFILE, STREAMS
from tests.gpu.process import (
    REFUSED,
    REPOSITORY,
    ProcessFailed,
    Started,
    find_program,
    in_process,
    run_command,
)

MINUTES = 6.0
"""For everything."""
CHECKS_S = 120.0
"""For what runs side by side, at most."""
LEAST_S = 12.0
"""Left over, for another step to begin."""
BUILD = REPOSITORY / "build" / "gpu"
SANITIZED = (
    "test_missing_sources_gaps_and_the_tail_become_zeros or test_rows_that_are_nonsense or "
    "test_the_sum_may_replace_one_of_its_parts or test_any_number_of_sources_packs[449]"
)
_SIDE_BY_SIDE = 10
_OUTPUT_CHARS = 3000
ENGINES = ("bare", "fully_shard", "layerzero")


@dataclass(frozen=True)
class Outcome:
    """What one step gave."""

    name: str
    status: str
    """"ok", "off" (it ran, and is not as expected), "failed", "killed" or "not run"."""
    measured: list[str] = field(default_factory=list)
    expected: list[str] = field(default_factory=list)
    suspects: list[str] = field(default_factory=list)
    """Pages, where the status is neither "ok" nor "not run"."""
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
    read: Callable[[Step, int | None, str, Path], Outcome]
    """Gets the exit status, or None if the step was killed; what it printed; and its folder."""
    env: dict[str, str] = field(default_factory=dict)
    needs: str | None = None
    """A program without which the step is not run."""
    waits: bool = False
    """The command may be started before its turn: it waits for a line of input."""

    def start(self, folder: str) -> Started:
        """`folder` is its own, and the command may name it as {folder}."""
        command = [part.replace("{folder}", folder) for part in self.command]
        command[0] = find_program(command[0]) or command[0]
        return Started(command, self.env)

    def run(self, limit_s: float, folder: str, started: Started | None = None) -> Outcome:
        if self.needs is not None and find_program(self.needs) is None:
            return Outcome(self.name, "not run", [f"no {self.needs} on this machine"])
        if limit_s < LEAST_S:
            return Outcome(self.name, "not run", ["no time was left for it"], [self.expects])
        began = time.monotonic()
        limit_s = min(limit_s, self.limit_s)
        code, output = (started or self.start(folder)).finish(limit_s)
        outcome = self.read(self, code, output, Path(folder))
        if code is None:
            measured = [*outcome.measured, f"not done after {limit_s:.0f} s"]
            outcome = replace(outcome, status="killed", measured=measured)
        return replace(
            outcome,
            expected=outcome.expected or [self.expects],
            suspects=outcome.suspects or ([] if outcome.is_fine else [self.suspect]),
            seconds=round(time.monotonic() - began, 1),
            output="" if outcome.is_fine else output[-_OUTPUT_CHARS:],
        )


def read_tests(step: Step, code: int | None, output: str, folder: Path) -> Outcome:
    """Of pytest, which wrote {folder}/tests.xml; a driver may refuse compute-sanitizer."""
    if "Device not supported" in output or "Unable to find injection" in output:
        return Outcome(step.name, "not run", ["compute-sanitizer refuses this device"])
    report = folder / "tests.xml"
    if not report.exists():
        return Outcome(step.name, "failed", [f"pytest ended with exit status {code}"])
    passed, failed, skipped = [], [], []
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {each.tag: each for each in case}
        problem, skip = kinds.get("failure", kinds.get("error")), kinds.get("skipped")
        if problem is not None:
            first = (problem.get("message") or "").strip().splitlines()[:1]
            failed.append(f"{case.get('name')}: {' '.join(first)[:200]}")
        elif skip is not None:
            skipped.append(f"{case.get('name')}: {skip.get('message')}")
        else:
            passed.append(str(case.get("name")))
    measured = [f"{len(passed)} passed, {len(failed)} failed, {len(skipped)} skipped", *failed]
    measured += [line for line in output.splitlines() if "ERROR SUMMARY" in line][:3]
    status = "ok" if code == 0 and passed else "failed"
    if code == 0 and skipped and not passed and all(REFUSED in each for each in skipped):
        status = "not run"
    data = {"passed": passed, "failed": failed, "skipped": skipped}
    return Outcome(step.name, status, measured, data=data)


def read_measures(step: Step, code: int | None, output: str, folder: Path) -> Outcome:
    """Of a benchmark that prints JSON as it goes: the last has all, also if it was killed."""
    result = _last_json(output)
    if result is None:
        return Outcome(step.name, "failed", [f"exit status {code}"])
    outcome = judge(step.name, result.get("measures", {}), result)
    return outcome if code in (0, None) else replace(outcome, status="failed", suspects=[])


def judge(name: str, measures: dict[str, float], data: dict[str, Any]) -> Outcome:
    """Each measure beside what is expected of it; on a CPU nothing is expected."""
    on_gpu = str(data.get("config", data).get("device", "")).startswith("cuda")
    rows, expected, suspects = [], [], []
    for measure, value in measures.items():
        kind, _, of = measure.partition("@")
        wanted = EXPECTED[kind]
        is_off = on_gpu and not wanted.holds(value)
        rows.append(f"{'OFF: ' if is_off else ''}{value:.4g} {wanted.what} ({of})")
        expected.append(f"{wanted.text} ({wanted.source})" if on_gpu else "a GPU's; this is a CPU")
        if is_off:
            suspects.append(wanted.page)
    details = data.get("details", {})
    rows += [*details.get("failures", []), *details.get("found", [])]
    pages = list(dict.fromkeys(suspects))
    return Outcome(name, "off" if pages else "ok", rows or ["ran"], expected, pages, data=data)


def _last_json(output: str) -> dict[str, Any] | None:
    for line in reversed(output.splitlines()):
        if line.startswith("{"):
            try:
                value: dict[str, Any] = json.loads(line)
            except ValueError:  # Cut off where the process was killed.
                continue
            return value
    return None


def _tests(
    name: str, limit_s: float, expects: str, suspect: str, *args: str, sanitizer: str = ""
) -> Step:
    """Of pytest; `sanitizer`: a tool of compute-sanitizer around it."""
    plain = ["-q", "--slow", "--tb=short", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *plain, "--junitxml={folder}/tests.xml", *args]
    if not sanitizer:
        return Step(name, expects, suspect, command, limit_s, read_tests)
    tool = ["--tool", sanitizer, "--error-exitcode", "9", "--target-processes", "all"]
    # It does not see past the end of a tensor inside a larger cached segment.
    env = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    under = ["compute-sanitizer", *tool, *command]
    return Step(name, expects, suspect, under, limit_s, read_tests, env, "compute-sanitizer")


def check_steps(on_cpu: bool) -> list[Step]:
    """What is checked side by side; the longest begin first."""
    if on_cpu:
        text = "nothing differs from the replica"
        name = "the mirror, and what a CPU can run of the rest"
        return [_tests(name, 240, text, FIRST_RUN, "tests/distributed/test_mirror.py")]
    pack, mirror, scenes = (f"tests/gpu/test_{name}.py" for name in ("pack", "mirror", "scenes"))
    same = "nothing differs from the replica"
    pool = "nothing differs, no illegal access"
    return [
        _tests("values, streams late", 120, same, STREAMS, mirror, "-k", "trains_like and late"),
        _tests("values, at once", 120, same, STREAMS, mirror, "-k", "trains_like and not late"),
        _tests(
            "missing waits",
            110,
            "each is seen: else the values prove little",
            STREAMS,
            *(mirror, "-k", "missing"),
        ),
        _tests("memory of expandable segments", 110, pool, STREAMS, scenes, "-k", "expandable"),
        _tests("memory of cudaMallocAsync", 110, pool, STREAMS, scenes, "-k", "cudaMallocAsync"),
        _tests(
            "a steady step",
            110,
            "no cudaMalloc; the stream is busy when the step returns",
            PROFILE,
            *(scenes, "-k", "steady"),
        ),
        _tests("uses", 110, "the losses of plain torch", PROFILE, "tests/gpu/test_uses.py"),
        _tests("graphs", 160, "the bits of eager steps", STREAMS, "tests/gpu/test_capture.py"),
        _tests("packing", 110, "the bits of plain torch", PACK, pack, "-k", "not bandwidth"),
        _tests(
            "NCCL alone",
            100,
            "values; no work on the current stream; abort returns; a stuck stream is reported",
            STREAMS,
            *(scenes, "-k", "nccl"),
        ),
        _tests(
            "two ranks of NCCL on one GPU",
            100,
            "the bits of plain training; NCCL may refuse",
            STREAMS,
            *(scenes, "-k", "two_ranks"),
        ),
        _tests(
            "packing, memcheck", 100, "0 errors", PACK, pack, "-k", SANITIZED, sanitizer="memcheck"
        ),
        _tests("use after free, memcheck", 100, "0 errors", STREAMS, scenes, "-k", "sanitizer"),
    ]


def bench_steps(on_cpu: bool, out: Path, link: str) -> list[Step]:
    """What is timed alone, the most telling first."""

    def part(limit_s: float, name: str, *args: str) -> Step:
        flags = [*(["--cpu"] if on_cpu else []), *(["--link", link] if link else []), "--wait"]
        module = [sys.executable, "-m", "benchmarks.bench_gpu_step"]
        command = [*module, "--part", name, *args, *flags]
        title = " ".join([name, *args[:2]]) if name != "trace" else name
        return Step(title, "it runs", FIRST_RUN, command, limit_s, read_measures, waits=True)

    worlds = ("--world", "8", "64")
    cells = ("--cells", "1x4096", "2x4096", "1x8192", "2x8192")
    steps = [
        part(30, "ceilings"),
        part(60, "step", "--size", "1b", *worlds, *cells, "--seconds", "2.5"),
        part(40, "host", "--cells", "1x1280", "1x6400", "--seconds", "3"),
        part(45, "memory", "--size", "1b", "--world", "4", "8", "--cells", "1x1024"),
        part(40, "trace", "--trace", str(out / "gpu_trace.json.gz")),
        part(70, "step", "--size", "8b/4", *worlds, *cells, "--seconds", "4"),
        part(35, "optimizer", "--cells", "1x512"),
        part(30, "step", "--variant", "checkpoint"),
    ]
    others = [
        part(50, "peers", "--size", "1b/2"),
        part(45, "checkpoint", "--size", "1b/4", "--cells", "1x512"),
    ]
    if on_cpu:
        return [*steps, *others]
    kernel = "tests/gpu/test_pack.py"
    return [
        *steps,
        part(75, "step", "--variant", "compile"),
        *others,
        _tests("packing's bandwidth", 40, "0.9 of a copy's", PACK, kernel, "-k", "bandwidth"),
    ]


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


def prepare(on_cpu: bool) -> tuple[dict[str, Any], Outcome]:
    """Describe the machine, and build the kernels where they are missing and can be built."""
    began, output = time.monotonic(), ""
    found = in_process("tests.gpu.day:machine", timeout=150)
    if not on_cpu and found["cuda"] and not found["kernels"]["cuda"] and found["nvcc"]:
        env = {"LAYERZERO_BUILD_EXT": "1", "LAYERZERO_CUDA_ARCHS": found["capability"]}
        build = [sys.executable, "setup.py", "build_ext", "--inplace"]
        code, output = run_command(build, 150, env)
        output = f"exit status {code}\n{output}"
        found = in_process("tests.gpu.day:machine", timeout=150)
    kernels = found["kernels"]
    is_fine = on_cpu or kernels["cuda"]
    return found, Outcome(
        "machine and kernels",
        "ok" if is_fine else "off",
        [f"native {kernels['native']}, CUDA {kernels['cuda']} {kernels['reason']}".strip()],
        ["built for this GPU, and loaded"] if not on_cpu else ["a GPU's; this is a CPU"],
        [] if is_fine else [PACK],
        round(time.monotonic() - began, 1),
        "" if is_fine else output[-_OUTPUT_CHARS:],
    )


def run_side_by_side(steps: Sequence[Step], deadline: float) -> Iterator[Outcome]:
    """Run steps at the same time, each within its limit and before `deadline` (monotonic)."""

    def run(step: Step) -> Outcome:
        with tempfile.TemporaryDirectory(prefix="day-") as folder:
            return step.run(deadline - time.monotonic(), folder)

    with ThreadPoolExecutor(_SIDE_BY_SIDE) as pool:
        for done in as_completed([pool.submit(run, step) for step in steps]):
            yield done.result()


def run_in_turn(steps: Sequence[Step], deadline: float) -> Iterator[Outcome]:
    """Run one step after the other; while it runs, the next imports what it needs, and waits."""
    started: Started | None = None
    for step, following in zip(steps, [*steps[1:], None], strict=False):
        current, started = started, None
        with tempfile.TemporaryDirectory(prefix="day-") as folder:
            left = deadline - time.monotonic()
            if current is None and step.waits and left >= LEAST_S:
                current = step.start(folder)
            if following is not None and following.waits and left >= 2 * LEAST_S:
                started = following.start("")
            outcome = step.run(left, folder, current)
        if current is not None and outcome.status == "not run":
            current.finish(0)
        yield outcome


def _line(outcome: Outcome) -> str:
    lines = [f"{outcome.status:8}{outcome.name} ({outcome.seconds:.0f} s)"]
    lines += [f"        {row}" for row in outcome.measured]
    lines += [f"        read {page}" for page in outcome.suspects]
    return "\n".join(lines)


def table(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """What benchmarks measured, a row each, with ratios of medians."""
    rows = [["", *ENGINES, "others", "over bare", "over fully_shard"]]
    for row in (row for each in outcomes for row in each.data.get("rows", [])):
        values: dict[str, float] = row["values"]
        others = [f"{k} {v:.4g}" for k, v in values.items() if k not in ENGINES]
        ours = values.get("layerzero")
        ratios = [
            f"{ours / values[other]:.3f}" if ours is not None and values.get(other) else ""
            for other in ENGINES[:2]
        ]
        cells = [f"{values[engine]:.4g}" if engine in values else "" for engine in ENGINES]
        what = f"{row['what']}, {row['unit']}" if row["unit"] else row["what"]
        rows.append([what, *cells, ", ".join(others), *ratios])
    return rows


def _rows_of_page(rows: Sequence[Sequence[str]]) -> list[str]:
    shown = ["| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in rows]
    return ["", shown[0], "|---" * len(rows[0]) + "|", *shown[1:]]


def markdown(on: dict[str, Any], outcomes: Sequence[Outcome]) -> str:
    """The result as a page."""
    steps = [["step", "status", "s", "measured", "expected", "read"]]
    for each in outcomes:
        cells = ["<br>".join(rows) for rows in (each.measured, each.expected, each.suspects)]
        steps.append([each.name, each.status, f"{each.seconds:.0f}", *cells])
    lines = ["# make gpu", "", *(f"- {name}: {value}" for name, value in on.items())]
    lines += [*_rows_of_page(table(outcomes)), *_rows_of_page(steps)]
    for each in outcomes:
        if each.output:
            lines += ["", f"## {each.name}: the end of its output", "", "```", each.output, "```"]
    return "\n".join(lines) + "\n"


def write(folders: Sequence[Path], on: dict[str, Any], outcomes: Sequence[Outcome]) -> None:
    """Markdown, JSON and the trace, into each folder."""
    result = {"machine": on, "steps": [asdict(each) for each in outcomes]}
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "gpu.md").write_text(markdown(on, outcomes))
        (folder / "gpu.json").write_text(json.dumps(result, indent=1))
        trace = folders[0] / "gpu_trace.json.gz"
        if trace.exists() and folder != folders[0]:
            shutil.copy(trace, folder)


def main(arguments: Sequence[str] | None = None) -> int:
    began = time.monotonic()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cpu", action="store_true", help="run the branches that need no GPU")
    parser.add_argument("--out", type=Path, default=BUILD, help="folder of the results")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for all steps together")
    parser.add_argument("--only", default="", help="steps whose name contains this")
    parser.add_argument("--link", default="", help='GB/s in and between nodes, SMs; or "none"')
    args = parser.parse_args(arguments)
    deadline = began + 60 * args.minutes - 3  # For writing.
    try:
        on, first = prepare(args.cpu)
    except ProcessFailed as error:
        print(f"torch or layerzero cannot be imported here:\n{error}")
        return 1
    if not args.cpu and on["cuda"] is None:
        print("no GPU: make gpu needs one; ARGS=--cpu runs what a CPU can")
        return 2
    folders = [args.out, *(Path(each) for each in [os.environ.get("OUT")] if each)]
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "gpu_trace.json.gz").unlink(missing_ok=True)
    checks, benches = (
        [step for step in steps if args.only in step.name]
        for steps in (check_steps(args.cpu), bench_steps(args.cpu, args.out, args.link))
    )
    checked_by = deadline if args.cpu else min(deadline, time.monotonic() + CHECKS_S)
    outcomes: list[Outcome] = []

    def note(outcome: Outcome) -> None:
        outcomes.append(outcome)
        print(_line(outcome), flush=True)
        write(folders, on, outcomes)

    note(first)
    for outcome in run_side_by_side(checks, checked_by):
        note(outcome)
    print(f"{time.monotonic() - began:.0f} s; now alone, {len(benches)} benchmarks", flush=True)
    for outcome in run_in_turn(benches, deadline):
        note(outcome)
    print("\n".join(_rows_of_page(table(outcomes))))
    not_run = sum(outcome.status == "not run" for outcome in outcomes)
    is_fine = all(each.is_fine for each in outcomes)
    verdict = "all ran; of a CPU nothing is expected" if args.cpu else "all is as expected"
    verdict = verdict if is_fine else "not all is as expected"
    page = os.path.relpath(args.out / "gpu.md")
    print(f"{verdict}, {not_run} steps not run, {time.monotonic() - began:.0f} s: {page} and .json")
    return int(not is_fine)


if __name__ == "__main__":
    sys.exit(main())
