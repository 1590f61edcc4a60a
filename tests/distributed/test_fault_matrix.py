"""Whatever fails, wherever it strikes: every survivor gets an error in time, or the run goes on.

`make faults` runs all cells; here are a few, with short timeouts.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from itertools import product

import pytest
import torch
import torch.distributed as dist

from tests.faults.cells import Cell, all_cells
from tests.faults.judge import problems_of
from tests.harness.internals import Operation, broadcast, describe_group
from tests.harness.ranks import on_ranks

SHORT = [
    Cell("SIGKILL", "gather", "last"),
    Cell("SIGSTOP, SIGCONT too late", "gather", "last"),
    Cell("SIGKILL", "save: new group", "first"),
    Cell("a socket closed", "construction: broadcast", "store"),
    Cell("disk full", "save: file", "random"),
]


def _assert_all_pass(cells: list[Cell], timeout_s: float, report_s: float) -> None:
    cells = [replace(cell, timeout_s=timeout_s, report_s=report_s) for cell in cells]
    with ThreadPoolExecutor(4) as pool:
        found = dict(zip(cells, pool.map(problems_of, cells), strict=True))
    # A busy machine may be slow to wake a rank: once more, one at a time.
    again = {cell: problems_of(cell) for cell, problems in found.items() if problems}
    problems = [f"{cell}: {text}" for cell, texts in again.items() for text in texts]
    assert not problems, "\n".join(problems)


def test_faults_strike_and_every_survivor_ends() -> None:
    _assert_all_pass(SHORT, 2.0, 0.2)


@pytest.mark.slow
def test_more_faults_strike_and_every_survivor_ends(pytestconfig: pytest.Config) -> None:
    """Every sixtieth cell; `make faults`: all."""
    step = 1 if pytestconfig.getoption("--every-fault") else 60
    _assert_all_pass(all_cells()[::step], 4.0, 5.0)


@pytest.mark.parametrize(
    "world_size", [3, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 5, 8))]
)
@on_ranks()
def test_a_broadcast_reaches_every_rank(world_size: int) -> None:
    group = describe_group(dist.group.WORLD, torch.device("cpu"), timedelta(seconds=30))
    for source, shape in product(range(group.size), [(3, 4), (), (0,)]):
        for dtype in (torch.float32, torch.bool, torch.int16, torch.complex64):
            tensor = torch.full(shape, group.rank).to(dtype)
            operation = Operation("test", f"{source} {shape} {dtype}", 1)
            broadcast(tensor, group, operation, source).wait()
            assert torch.equal(tensor, torch.full(shape, source).to(dtype))
