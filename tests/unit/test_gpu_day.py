"""The driver of the first GPU run reports every way in which a step can end, and always ends."""

import json
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_expected import EXPECTED
from tests.gpu import day
from tests.gpu.day import Outcome, Step, judge, run_in_turn, run_side_by_side
from tests.gpu.process import REFUSED
from tests.harness.pages import REPOSITORY

SUSPECT = "docs/internals/streams.md"


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def only_exit(step: Step, code: int | None, output: str, folder: Path) -> Outcome:
    return Outcome(step.name, "ok" if code == 0 else "failed", [f"exit status {code}"])


def run_one(command: list[str], read=only_exit, **more) -> Outcome:
    step = Step("a step", "something", SUSPECT, command, 60.0, read, **more)
    (outcome,) = run_in_turn([step], time.monotonic() + 100)
    return outcome


def test_a_step_that_fails_names_its_suspect_and_shows_its_output() -> None:
    outcome = run_one(python("print(1)"))
    assert (outcome.status, outcome.suspects, outcome.output) == ("ok", [], "")
    outcome = run_one(python("print('the reason'); raise SystemExit(3)"))
    assert (outcome.status, outcome.measured) == ("failed", ["exit status 3"])
    assert outcome.suspects == [SUSPECT] and "the reason" in outcome.output


def test_a_step_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    """Those of its session, and those that began one of their own."""
    steps = []
    for session in (False, True):
        child = f"import time; time.sleep(2.5); open({str(tmp_path / str(session))!r}, 'w')"
        code = (
            "import subprocess, sys\n"
            f"subprocess.run([sys.executable, '-c', {child!r}], start_new_session={session})"
        )
        steps.append(Step(str(session), "", SUSPECT, python(code), 1.0, only_exit))
    begin = time.monotonic()
    outcomes = list(run_side_by_side(steps, begin + 100))
    assert [(each.status, each.suspects) for each in outcomes] == [("killed", [SUSPECT])] * 2
    time.sleep(max(begin + 4 - time.monotonic(), 0))
    assert list(tmp_path.iterdir()) == []


def test_steps_that_no_longer_fit_or_lack_their_program_are_not_run() -> None:
    outcome = run_one(["no-such-program"], needs="no-such-program")
    assert outcome.status == "not run" and outcome.is_fine
    step = Step("late", "something", SUSPECT, python("1"), 60, only_exit)
    for run in (run_in_turn, run_side_by_side):
        (outcome,) = run([step], time.monotonic() + 5)
        assert (outcome.status, outcome.is_fine) == ("not run", True)


def test_the_next_step_gets_ready_meanwhile_but_waits_for_its_turn(tmp_path: Path) -> None:
    ready, began = tmp_path / "ready", tmp_path / "began"
    first = (
        f"import pathlib, time\nwhile not pathlib.Path({str(ready)!r}).exists(): time.sleep(0.01)\n"
        f"assert not pathlib.Path({str(began)!r}).exists()"
    )
    second = f"open({str(ready)!r}, 'w'); input(); open({str(began)!r}, 'w')"
    steps = [
        Step(name, "", SUSPECT, python(code), 30, only_exit, waits=waits)
        for name, code, waits in (("first", first, False), ("second", second, True))
    ]
    outcomes = list(run_in_turn(steps, time.monotonic() + 60))
    assert [each.status for each in outcomes] == ["ok", "ok"] and began.exists()


def test_a_benchmark_that_is_killed_keeps_what_it_has_measured() -> None:
    step = Step("a benchmark", "", SUSPECT, [], 1, day.read_measures)
    printed = '{"measures": {}, "rows": [1]}\n{"cut'
    assert day.read_measures(step, None, printed, Path()).data["rows"] == [1]
    for nothing in ("hello", "{"):
        assert day.read_measures(step, 0, nothing, Path()).status == "failed"


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
    ini = tmp_path / "no.ini"
    ini.write_text("[pytest]\n")
    step = day._tests("", 60, "", SUSPECT, str(file), "--rootdir", str(tmp_path), "-c", str(ini))
    outcome = run_one(step.command, day.read_tests)
    assert outcome.status == "failed"
    assert outcome.measured[0] == "1 passed, 1 failed, 1 skipped"
    assert outcome.measured[1].startswith("test_bad: assert 1 == 2")
    assert outcome.data["passed"] == ["test_good"]


def test_tests_that_were_skipped_or_refused_prove_nothing(tmp_path: Path) -> None:
    step = Step("nothing ran", "", SUSPECT, [], 1, day.read_tests)
    for reason, code, output, status in (
        ("no kernels", 0, "", "failed"),
        (f"{REFUSED}by compute-sanitizer", 0, "", "not run"),
        ("", 1, "========= Device not supported", "not run"),
    ):
        (tmp_path / "tests.xml").write_text(
            f'<testsuites><testsuite><testcase name="a"><skipped message="{reason}"/></testcase>'
            "</testsuite></testsuites>"
        )
        assert day.read_tests(step, code, output, tmp_path).status == status, reason


def test_every_measure_that_is_off_names_a_page_that_exists() -> None:
    on_gpu, on_cpu = ({"config": {"device": device}} for device in ("cuda:0", "cpu"))
    for measure, wanted in EXPECTED.items():
        assert judge("a step", {measure: wanted.high}, on_gpu).status == "ok"
        off = {f"{measure}@a row": wanted.high * 1.5 + 1}
        outcome = judge("a step", off, on_gpu)
        assert outcome.status == "off" and outcome.measured[0].startswith("OFF: ")
        assert outcome.suspects == [wanted.page] and (REPOSITORY / wanted.page).exists()
        assert judge("a step", off, on_cpu).status == "ok"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line(tmp_path: Path, capsys) -> None:
    assert day.main(["--out", str(tmp_path)]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["no GPU: make gpu needs one; ARGS=--cpu runs what a CPU can"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("on_cpu", [False, True], ids=["all", "what a CPU can"])
def test_every_step_names_a_page_and_files_that_exist(on_cpu: bool, tmp_path: Path) -> None:
    for step in (*day.check_steps(on_cpu), *day.bench_steps(on_cpu, tmp_path, "")):
        assert (REPOSITORY / step.suspect).exists(), step
        files = [part for part in step.command if part.endswith(".py")]
        assert all((REPOSITORY / file).exists() for file in files), step
    text = (REPOSITORY / "tests/gpu/test_pack.py").read_text()
    for name in day.SANITIZED.split(" or "):
        assert f"def {name.partition('[')[0]}" in text, name


@pytest.mark.slow
def test_the_result_is_written_twice_into_each_folder(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    assert day.main(["--cpu", "--only", "ceilings", "--out", str(tmp_path / "build")]) == 0
    printed = capsys.readouterr().out
    assert "of a CPU nothing is expected" in printed and "over fully_shard" in printed
    for folder in (tmp_path / "build", tmp_path / "out"):
        result = json.loads((folder / "gpu.json").read_text())
        assert [step["status"] for step in result["steps"]] == ["ok", "ok"]
        assert result["machine"]["torch"] == torch.__version__
        page = (folder / "gpu.md").read_text()
        assert "| ceilings | ok |" in page and torch.__version__ in page
        assert "| copy, read and written, TB/s |" in page


def test_the_table_has_ratios_of_medians() -> None:
    row = {"what": "passes", "unit": "ms", "values": {"bare": 2.0, "layerzero": 3.0, "peer": 4.0}}
    header, cells = day.table([Outcome("a step", "ok", data={"rows": [row]})])
    assert dict(zip(header, cells, strict=True)) == {
        **{"": "passes, ms", "bare": "2", "fully_shard": "", "layerzero": "3"},
        **{"others": "peer 4", "over bare": "1.500", "over fully_shard": ""},
    }
