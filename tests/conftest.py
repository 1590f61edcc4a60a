"""Seeds and markers of the whole suite."""

import gc
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from layerzero import notices
from tests.harness import fake_ranks
from tests.harness.checks import with_each_seed
from tests.harness.ranks import KeptRanks, fork_the_server, run_ranks

pytest_plugins = ["tests.harness.skips"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--seeds",
        type=int,
        default=0,
        help="of each test of random models, instead of the few of every day; and sweeps in full, "
        "instead of one case of each class (make soak)",
    )
    parser.addoption(
        "--cases",
        type=int,
        default=0,
        help="of each fuzzed format, instead of the few of every day (make soak)",
    )
    parser.addoption(
        "--slow",
        action="store_true",
        help="also tests marked slow: the same promises at more sizes, and other people's tools",
    )
    parser.addoption(
        "--every-fault",
        action="store_true",
        help="kill at every call instead of once at each stage (make faults)",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: runs with --slow, as .ci/run does, or by name")
    config.addinivalue_line("markers", "soak: runs with --seeds, as make soak does, or by name")


@pytest.fixture
def in_full(pytestconfig: pytest.Config) -> bool:
    """Whether a sweep takes every case (`make soak`), and not one of each class."""
    return bool(pytestconfig.getoption("--seeds"))


@pytest.fixture
def seeds_or(pytestconfig: pytest.Config) -> Callable[[int], range]:
    """Seeds of fuzzed cases: so many, or as many as `--cases` says."""
    return lambda few: range(pytestconfig.getoption("cases") or few)


FIRST = (
    *("test_cuda_build.py", "test_wheel.py"),
    "test_memory_budget.py",
    *("test_watchdog.py", "test_graph_capture.py"),
    *("test_checkpoint_safety.py", "test_megatron.py", "test_random_models.py"),
)
"""Begun first, while other workers have something to do: each has a test that takes up to a
minute, or mostly waits."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in FIRST)
    if not any("::" in argument for argument in config.args):
        options = {"slow": "slow", "soak": "seeds"}
        unwanted = {marker for marker in options if not config.getoption(options[marker])}
        left_out = [item for item in items if unwanted.intersection(item.keywords)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if unwanted.isdisjoint(item.keywords)]
    if not torch.accelerator.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no accelerator on this machine"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> Iterator[Any]:
    if session.items and not session.config.getoption("collectonly"):
        # What is imported by now stays: no later garbage collection visits it.
        gc.collect()
        gc.freeze()
        fork_the_server()
    return (yield)


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def nothing_told() -> None:
    """A warning that comes once in a process comes once in each test."""
    notices._issued.clear()


@pytest.fixture(scope="module", autouse=True)
def _simulated_ranks_end() -> Iterator[None]:
    yield
    fake_ranks.kept.close()


@pytest.fixture
def on_each_seed(pytestconfig: pytest.Config, ranks: KeptRanks) -> Callable[..., None]:
    """Calls a function on ranks with each of these seeds, or with as many as `--seeds` says, from
    the same first one; `fresh`: every few seeds on new ranks."""

    def run(
        num_ranks: int, train: Any, seeds: range, *given: Any, fresh: bool = False, **options: Any
    ) -> None:
        stop = seeds.start + (pytestconfig.getoption("--seeds") or len(seeds))
        for first in range(seeds.start, stop, 10):
            some = range(first, min(first + 10, stop))
            call = run_ranks if fresh else ranks
            call(num_ranks, with_each_seed, train, some, *given, timeout=240, **options)

    return run


@pytest.fixture(scope="module")
def ranks() -> Iterator[KeptRanks]:
    """Ranks that the tests of a file share."""
    kept = KeptRanks()
    try:
        yield kept
    finally:
        kept.close()
