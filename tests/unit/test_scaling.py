"""Units and links of `bench_scaling`, against cases worked out by hand."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from tests.harness.checks import of_floats
from tests.harness.pages import REPOSITORY


@pytest.fixture
def of_benchmarks(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    return importlib.import_module


def test_rings_through_all_links_of_a_node_add_their_bandwidths(of_benchmarks: Any) -> None:
    link = of_benchmarks("simulator").Link
    combined = of_benchmarks("bench_scaling").through_all_links
    inside, between = link(1.0, 300.0), link(5.0, 50.0)
    assert combined(inside, between, 4) == link(2.0, 200.0)
    assert combined(inside, between, 8) == link(1.5, 300.0)


def event(name: str, begin: float, end: float, lane: int = 1, rank: int = 0) -> dict[str, Any]:
    what = {"name": f"LayerZeRO3.{name}", "ph": "X", "pid": rank, "tid": lane}
    return {**what, "ts": begin * 1e6, "dur": (end - begin) * 1e6, "args": {"bytes": 800}}


def test_units_of_a_ledger_have_their_own_compute_without_waits(of_benchmarks: Any) -> None:
    spans = [
        event("forward(model)", 0, 20),
        event("forward(a)", 2, 8),
        event("wait_for_unshard(a)", 2, 4),
        event("forward(b)", 8, 9),
        event("forward(the root unit)", 10, 12),
        event("backward(model)", 20, 50),
        event("backward(a)", 22, 42),
        event("wait_for_reduce(b)", 40, 42),
        event("unshard(a)", 0, 4, lane=2),
        event("unshard(the root unit)", 0, 4, lane=2),
        event("forward(a)", 0, 90, rank=1),
    ]
    trace = {"traceEvents": spans, "otherData": {"num_steps": 2}}
    units = of_benchmarks("device_program").units_of_ledger(trace, itemsize=4)
    assert [tuple(unit) for unit in units] == [
        of_floats((200, 4 / 2, 18 / 2)),
        of_floats((0, 1 / 2, 0)),
        of_floats((200, (20 - 6 - 1) / 2, (30 - 20) / 2)),
    ]
