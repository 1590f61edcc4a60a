"""The numeric tests pass as on other processors; in every setting: make test-processors."""

from __future__ import annotations

import pytest

from tests import processors


@pytest.mark.parametrize("name", processors.SHORT)
def test_numeric_tests_pass_as_on_another_processor(name: str) -> None:
    folder = processors.REPOSITORY / "tests" / "distributed"
    files = [str(folder / each) for each in processors.SHORT_FILES]
    code, output = processors.run(processors.SHORT[name], files, ["-x"])
    assert code == 0, output


def test_the_numeric_tests_are_found() -> None:
    names = {each.rpartition("/")[2] for each in processors.numeric_files()}
    assert names >= {"test_grads.py", "test_layered.py", "test_tensor_parallel.py"}
    assert "test_timeouts.py" not in names
