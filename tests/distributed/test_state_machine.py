"""Random sequences of what users do, failures included, leave the state of an unsharded model."""

from __future__ import annotations

import pytest

from tests.harness.ranks import run_ranks
from tests.harness.twin_machine import run_machines

_A_GROUP = 16


def test_random_actions_leave_the_state_of_an_unsharded_model(pytestconfig: pytest.Config) -> None:
    num_runs = pytestconfig.getoption("--seeds")
    if not num_runs:
        run_ranks(2, run_machines, range(2), 12)
        return
    for first in range(0, num_runs, _A_GROUP):
        seeds = range(first, min(first + _A_GROUP, num_runs))
        run_ranks(2, run_machines, seeds, 30, timeout=600)
