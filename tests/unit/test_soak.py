"""`make soak` runs what tests leave to it."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
LEFT_TO_IT = ("in_full", "pytest.mark.soak", 'getoption("--seeds")', 'getoption("seeds")')


def test_make_soak_runs_every_file_that_does_more_with_seeds() -> None:
    texts = {path: path.read_text() for path in (TESTS / "distributed").glob("test_*.py")}
    files = [path for path, text in texts.items() if any(each in text for each in LEFT_TO_IT)]
    assert len(files) > 10
    words = (TESTS.parent / "Makefile").read_text().split()
    for path in files:
        name = path.stem.removeprefix("test_")
        assert {name, f"tests/distributed/{path.name}"} & set(words), path
