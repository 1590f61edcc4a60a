"""The numeric tests pass as on other processors; in every setting: make test-processors."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import processors


@pytest.mark.parametrize("name", processors.SHORT)
def test_numeric_tests_pass_as_on_another_processor(name: str, tmp_path: Path) -> None:
    setting = {**processors.SHORT[name], **processors.as_intel(tmp_path)}
    folder = processors.REPOSITORY / "tests" / "distributed"
    tests = [f"{folder}/test_{each}" for each in processors.SHORT_TESTS]
    code, output = processors.run(setting, tests, [])
    assert code == 0 and f"{len(tests)} passed" in output, output


def test_the_files_are_some_of_those_that_compare_numbers() -> None:
    files = {*processors.named_files(processors.FILES)}
    assert all(Path(path).exists() for path in files)
    assert {path for path in files if "/distributed/" in path} <= {*processors.numeric_files()}
