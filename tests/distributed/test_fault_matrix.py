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

from layerzero.comm.exchanges import broadcast
from layerzero.comm.pending import Operation
from layerzero.flat.groups import describe_group
from tests.faults.cells import FAULTS, PLACES, POSITIONS, Cell, all_cells, meaning
from tests.faults.judge import run_cell
from tests.harness.ranks import on_ranks

SHORT = [
    Cell("SIGKILL", "gather", "last"),
    Cell("SIGKILL", "save: new group", "first"),
    Cell("SIGSEGV", "construction: broadcast", "store"),
    Cell("disk full", "save: file", "random"),
]
LONGER = [
    Cell("SIGKILL", "reduction", "store"),
    Cell("SIGKILL", "load: file", "first", "two at once"),
    Cell("SIGSEGV", "clip", "random", "one while the first is diagnosed"),
    Cell("SIGSTOP, SIGCONT in time", "presence exchange", "random"),
    Cell("SIGSTOP, SIGCONT too late", "construction: new group", "store"),
    Cell("GIL held too long", "load: exchange", "last"),
    Cell("a socket closed", "save: exchange", "random"),
    Cell("abort() of the group", "between steps", "first"),
    Cell("a message half sent", "construction: exchange", "random"),
]


def _assert_all_pass(cells: list[Cell], timeout_s: float, report_s: float) -> None:
    cells = [replace(cell, timeout_s=timeout_s, report_s=report_s) for cell in cells]
    with ThreadPoolExecutor(len(cells)) as pool:
        verdicts = list(pool.map(run_cell, cells))
    problems = [f"{each.cell}: {text}" for each in verdicts for text in each.problems]
    assert not problems, "\n".join(problems)


def test_faults_strike_and_every_survivor_ends() -> None:
    _assert_all_pass(SHORT, 2.0, 0.2)


@pytest.mark.soak
def test_more_faults_strike_and_every_survivor_ends() -> None:
    _assert_all_pass(LONGER[:5], 4.0, 1.0)
    _assert_all_pass(LONGER[5:], 4.0, 1.0)


def test_the_matrix_has_every_cell_that_means_something() -> None:
    cells = {(cell.fault, cell.place, cell.position) for cell in all_cells() if not cell.second}
    for fault, place, position in product(FAULTS, PLACES, POSITIONS):
        assert ((fault, place, position) in cells) == (meaning(fault, place) is None)
    for cell in all_cells():
        assert len(set(cell.victims)) == 1 + bool(cell.second)
        assert max(cell.victims) < cell.world_size


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
