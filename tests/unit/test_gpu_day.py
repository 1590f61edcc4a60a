"""The driver of the first GPU run reports every way in which a step can end, and always ends."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_expected import EXPECTED
from tests.gpu import day
from tests.gpu.day import Outcome, Step, judge, run_steps
from tests.gpu.process import REFUSED
from tests.harness.pages import REPOSITORY

SUSPECT = "finding 1, docs/internals/streams.md"


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def only_exit(step: Step, code: int, output: str, folder: Path) -> Outcome:
    return Outcome(step.name, "ok" if code == 0 else "failed", [f"exit status {code}"])


def run_one(command: list[str], read=only_exit, limit_s: float = 60.0, **more) -> Outcome:
    step = Step("a step", "something", SUSPECT, command, limit_s, read, **more)
    (outcome,) = run_steps([step], time.monotonic() + 100)
    return outcome


def test_a_step_that_is_fine_names_no_suspect() -> None:
    outcome = run_one(python("print(1)"))
    assert (outcome.status, outcome.suspects, outcome.output) == ("ok", [], "")


def test_a_step_that_fails_names_its_suspect_and_shows_its_output() -> None:
    outcome = run_one(python("print('the reason'); raise SystemExit(3)"))
    assert (outcome.status, outcome.measured) == ("failed", ["exit status 3"])
    assert outcome.suspects == [SUSPECT] and "the reason" in outcome.output


@pytest.mark.parametrize("session", [False, True], ids=["same session", "own session"])
def test_a_step_that_hangs_is_killed_with_its_children(session: bool, tmp_path: Path) -> None:
    alive = tmp_path / "alive"
    child = f"import time; time.sleep(3); open({str(alive)!r}, 'w')"
    code = (
        "import subprocess, sys\n"
        f"subprocess.run([sys.executable, '-c', {child!r}], start_new_session={session})"
    )
    outcome = run_one(python(code), limit_s=1.0)
    assert (outcome.status, outcome.suspects) == ("killed", [SUSPECT])
    time.sleep(3)
    assert not alive.exists()


def test_a_step_without_its_program_is_not_run() -> None:
    outcome = run_one(["no-such-program"], needs="no-such-program")
    assert outcome.status == "not run" and outcome.is_fine


def test_steps_after_the_deadline_are_reported() -> None:
    step = Step("late", "something", SUSPECT, python("1"), 60, only_exit)
    (outcome,) = run_steps([step], time.monotonic() - 1)
    assert (outcome.status, outcome.is_fine) == ("killed", False)


def test_tests_are_read_by_name(tmp_path: Path) -> None:
    file = tmp_path / "test_three.py"
    file.write_text(
        "import pytest\n"
        "def test_good(): pass\n"
        "def test_bad(): assert 1 == 2\n"
        "def test_away(): pytest.skip('not here')\n"
    )
    # The steps run slow tests, too; the option is one of tests/conftest.py.
    (tmp_path / "conftest.py").write_text(
        "def pytest_addoption(parser): parser.addoption('--slow', action='store_true')\n"
    )
    command = day._pytest(str(file), "--rootdir", str(tmp_path), "-c", str(tmp_path / "no.ini"))
    (tmp_path / "no.ini").write_text("[pytest]\n")
    outcome = run_one(command, day.read_tests)
    assert outcome.status == "failed"
    assert outcome.measured[0] == "1 passed, 1 failed, 1 skipped"
    assert outcome.measured[1].startswith("test_bad: assert 1 == 2")
    assert outcome.data["passed"] == ["test_good"]


@pytest.mark.parametrize(
    ("reason", "status"),
    [("no kernels", "failed"), (f"{REFUSED}by compute-sanitizer", "not run")],
)
def test_tests_that_were_all_skipped_prove_nothing(reason: str, status: str, tmp_path) -> None:
    (tmp_path / "tests.xml").write_text(
        f'<testsuites><testsuite><testcase name="a"><skipped message="{reason}"/></testcase>'
        "</testsuite></testsuites>"
    )
    step = Step("skipped", "", SUSPECT, [], 1, day.read_tests)
    assert day.read_tests(step, 0, "", tmp_path).status == status


@pytest.mark.parametrize("measure", EXPECTED)
def test_every_measure_that_is_off_names_a_page_that_exists(measure: str) -> None:
    wanted = EXPECTED[measure]
    on_gpu = {"config": {"device": "cuda:0"}}
    assert judge("a step", {measure: wanted.high}, on_gpu).status == "ok"
    outcome = judge("a step", {measure: wanted.high * 1.5 + 1}, on_gpu)
    assert outcome.status == "off" and outcome.measured[0].startswith("OFF: ")
    assert outcome.suspects == [wanted.suspect]
    assert (REPOSITORY / wanted.page).exists()
    table = (REPOSITORY / "docs/howto/first_gpu_run.md").read_text()
    assert wanted.finding is None or f"| {wanted.finding} |" in table
    on_cpu = judge("a step", {measure: wanted.high * 1.5 + 1}, {"config": {"device": "cpu"}})
    assert on_cpu.status == "ok"


def test_a_benchmark_that_prints_no_result_has_failed() -> None:
    assert run_one(python("print('hello')"), day.read_measures).status == "failed"
    assert run_one(python("print('{')"), day.read_measures).status == "failed"


def test_a_sanitizer_that_the_machine_refuses_is_not_run(tmp_path: Path) -> None:
    step = Step("sanitizer", "", SUSPECT, [], 1, day.read_sanitizer)
    outcome = day.read_sanitizer(step, 1, "========= Device not supported", tmp_path)
    assert outcome.status == "not run"


def test_what_the_sanitizer_runs_exists() -> None:
    text = (REPOSITORY / "tests/gpu/test_pack.py").read_text()
    for name in day.SANITIZED.split(" or "):
        assert f"def {name.partition('[')[0]}" in text, name


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line(tmp_path: Path, monkeypatch, capsys) -> None:
    for what in ("check", "bench"):
        assert day.main([what, "--out", str(tmp_path)]) == 2
        lines = capsys.readouterr().out.splitlines()
        assert lines == [f"no GPU: make gpu-{what} needs one; ARGS=--cpu runs what a CPU can"]
        machine = {"cuda": None}, Outcome("machine", "off")
        monkeypatch.setattr(day, "prepare", lambda on_cpu, machine=machine: machine)
    assert list(tmp_path.iterdir()) == []


def test_the_result_is_written_twice(tmp_path: Path, capsys) -> None:
    arguments = ["bench", "--cpu", "--only", "ceilings", "--out", str(tmp_path)]
    assert day.main(arguments) == 0
    assert "of a CPU nothing is expected" in capsys.readouterr().out
    result = json.loads((tmp_path / "gpu_bench.json").read_text())
    assert [step["status"] for step in result["steps"]] == ["ok", "ok"]
    assert result["machine"]["torch"] == torch.__version__
    page = (tmp_path / "gpu_bench.md").read_text()
    assert "| bench_gpu_step ceilings | ok |" in page and torch.__version__ in page
