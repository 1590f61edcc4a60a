"""With --strict-skips, a test that was skipped and had no need to be is a failure.

A machine without an accelerator skips what needs one, and an older torch what is new in a later
one. Everything else is there where the whole suite is meant to run: a framework that is no longer
found must not pass for one that works.
"""

import importlib.metadata
from typing import Any

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--strict-skips",
        action="store_true",
        help="fail when a test is skipped that does not need an accelerator",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs an accelerator; skipped where there is none")
    config.addinivalue_line("markers", "since_torch(version): skipped under an older torch")
    if not hasattr(config, "workerinput"):  # with pytest-xdist: the process that sees all reports
        config.pluginmanager.register(_Skips(), "layerzero-skips")


def pytest_runtest_setup(item: pytest.Item) -> None:
    mark = item.get_closest_marker("since_torch")
    if mark is not None and _torch_version() < _numbers(mark.args[0]):
        pytest.skip(f"needs torch {mark.args[0]}")


class _Skips:
    def __init__(self) -> None:
        self._unexpected: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            self._note(report, _may_be_skipped(report.keywords))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self._note(report, may_be=False)

    def _note(self, report: Any, may_be: bool) -> None:
        _, _, reason = report.longrepr
        if not may_be:
            self._unexpected.add(f"{report.nodeid}: {reason}")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._unexpected and session.config.getoption("--strict-skips"):
            session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any, config: pytest.Config) -> None:
        if config.getoption("--strict-skips"):
            for each in sorted(self._unexpected):
                terminalreporter.write_line(f"unexpected skip: {each}", red=True)


def _may_be_skipped(keywords: Any) -> bool:
    if "since_torch" in keywords:  # by `pytest_runtest_setup`, which looked at the version
        return True
    return "gpu" in keywords and not torch.accelerator.is_available()


def _torch_version() -> tuple[int, ...]:
    return _numbers(importlib.metadata.version("torch"))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2])
