"""Prints how many tests `make test` runs and for how long, from what each took before."""

from typing import Any

import pytest

KEY = "layerzero/seconds"  # of pytest's cache: seconds by the id of a test
FIRST_TIME = "make test takes 8 to 10 minutes on 2 quiet cores of an AMD EPYC"


def pytest_configure(config: pytest.Config) -> None:
    longer = any(config.getoption(name, 0) for name in ("seeds", "cases", "every_fault"))
    if not longer and not hasattr(config, "workerinput") and hasattr(config, "cache"):
        config.pluginmanager.register(ExpectedTime(config))


class ExpectedTime:
    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._seconds: dict[str, float] = {}

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        if node.workerinput["workerid"] != "gw0" or not ids:
            return
        before, num_workers = self._config.cache.get(KEY, {}), node.workerinput["workercount"]
        seconds = [before[each] for each in ids if each in before]
        time = FIRST_TIME
        if 2 * len(seconds) > len(ids):  # as long as a known test, on average, for each of the rest
            total = max(1.0, sum(seconds) / len(seconds) * len(ids) / num_workers, *seconds)
            about = f"{total / 60:.0f} minutes" if total >= 90 else f"{total:.0f} s"
            time = f"about {about}, as they took here before"
        reporter: Any = self._config.pluginmanager.getplugin("terminalreporter")
        reporter.write_line(f"{len(ids)} tests, {num_workers} at a time: {time}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        so_far = self._seconds.get(report.nodeid, 0.0)
        self._seconds[report.nodeid] = so_far + report.duration

    def pytest_sessionfinish(self) -> None:
        self._config.cache.set(KEY, self._config.cache.get(KEY, {}) | self._seconds)
