"""With --strict-skips, a test that was skipped and had no need to be is a failure.

A machine without an accelerator skips what needs one, and an older torch what is new in a later
one. Everything else is there where the whole suite is meant to run: a framework that is no longer
found must not pass for one that works.
"""

import importlib.metadata
from collections.abc import Generator
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


def pytest_runtest_setup(item: pytest.Item) -> None:
    mark = item.get_closest_marker("since_torch")
    if mark is not None and _numbers(importlib.metadata.version("torch")) < _numbers(mark.args[0]):
        pytest.skip(f"needs torch {mark.args[0]}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    report = yield
    # Of "since_torch" `pytest_runtest_setup` has looked at the version.
    may_be = "since_torch" in item.keywords
    may_be |= "gpu" in item.keywords and not torch.accelerator.is_available()
    return report if may_be or hasattr(report, "wasxfail") else _strict(report, item.config)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    return _strict((yield), collector.config)


def _strict(report: Any, config: pytest.Config) -> Any:
    if report.skipped and config.getoption("--strict-skips"):
        report.outcome, report.longrepr = "failed", f"unexpected skip: {report.longrepr[2]}"
    return report


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2])
