"""`make soak` runs what tests leave to it, and `make test-processors` the numeric tests, which pass
as on other processors."""

from pathlib import Path

from tests import processors

TESTS = Path(__file__).resolve().parents[1]
LEFT_TO_IT = ("in_full", "on_each_seed", "pytest.mark.soak", 'seeds")')


def test_make_soak_runs_every_file_that_does_more_with_seeds() -> None:
    paths = [path for path in TESTS.glob("*/test_*.py") if path != Path(__file__)]
    texts = {path: path.read_text() for path in paths}
    files = [path for path, text in texts.items() if any(each in text for each in LEFT_TO_IT)]
    assert len(files) > 10
    makefile = (TESTS.parent / "Makefile").read_text()
    words = makefile.replace("\\\n", " ").split()
    sweeps = makefile.replace("\\\n", " ").partition("SWEEPS := ")[2].partition("\n")[0].split()
    assert all((TESTS / "distributed" / f"test_{name}.py").exists() for name in sweeps), sweeps
    for path in files:
        name = path.stem.removeprefix("test_")
        file = f"tests/{path.parent.name}/{path.name}"
        assert {name, file} & set(words), path


def test_numeric_tests_pass_as_on_an_old_processor(tmp_path: Path) -> None:
    setting = {**processors.OLD, **processors.as_intel(tmp_path)}
    folder = processors.REPOSITORY / "tests" / "distributed"
    tests = [f"{folder}/test_{each}" for each in processors.SHORT_TESTS]
    code, output = processors.run(setting, tests, [])
    assert code == 0 and f"{len(tests)} passed" in output, output


def test_files_for_other_processors_exist() -> None:
    assert all(Path(path).exists() for path in processors.named_files(processors.FILES))
