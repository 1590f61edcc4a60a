"""The advice names what to change for the reason that costs most."""

from __future__ import annotations

from layerzero.config import GatherBudget
from layerzero.step_ledger.advice import Settings, advise
from layerzero.step_ledger.figures import Explained
from layerzero.step_ledger.records import (
    HOST_BOUND,
    ISSUED_LATE,
    LIMITER,
    TRANSFER,
    Hop,
    Job,
    JobKind,
    Phase,
    Record,
    Slice,
    Wait,
)

SETTINGS = Settings(1, True, GatherBudget(max_units=3))


def _job(kind: JobKind, number: int, at: float, end: float, cause: str, phase: Phase) -> Job:
    verb = "all-gather" if kind == "gather" else "reduce-scatter"
    hop = Hop(number, verb, (0, 1), 8_000_000, at, at, end, end)
    return Job(kind, f"blocks.{number}", phase, at, cause, at, [hop])


def _forward(*gathers: tuple[float, float, float, float], cause: str = TRANSFER) -> Record:
    """One step of a forward alone. Each gather: asked, arrived, wait begins, wait ends."""
    end = gathers[-1][3] + 1
    jobs = [
        _job("gather", number, asked, arrived, cause, "forward")
        for number, (asked, arrived, _, _) in enumerate(gathers)
    ]
    waits = [Wait(i, i, begin, done) for i, (_, _, begin, done) in enumerate(gathers)]
    return Record(0, 0, end, jobs, waits, [Slice("forward", "", 0, end)], num_forwards=1)


def _advice(record: Record, settings: Settings = SETTINGS, **peers: Record) -> str:
    records = {0: record, **{int(name[1:]): peer for name, peer in peers.items()}}
    return advise(Explained(records), 0, settings)


def test_transfers_that_compute_is_too_short_to_hide_are_named() -> None:
    even = [(max(i - 1, 0) * 4, i * 4 + 4, i * 4 + 1, i * 4 + 4) for i in range(5)]
    assert "compute is too short to hide the transfers" in _advice(_forward(*even))


def test_late_gathers_are_asked_for_ahead() -> None:
    late = _forward((0, 1, 0, 1), (2, 4, 2, 4), (5, 9, 5, 9), cause=ISSUED_LATE)
    assert "set `forward_prefetch=1`" in _advice(late, SETTINGS._replace(forward_depth=0))
    assert "in the same order in each step" in _advice(late)
    first = _forward((0, 9, 0, 9), cause=ISSUED_LATE)
    assert "make the first unit of forward and of backward smaller" in _advice(first)
    for job in late.jobs:
        job.phase = "backward"
    late.slices = [Slice("backward", "", 0, 10)]
    settings = SETTINGS._replace(prefetches_backward=False)
    assert "set `backward_prefetch=BackwardPrefetch.BACKWARD_PRE`" in _advice(late, settings)


def test_a_larger_budget_is_advised() -> None:
    refused = _forward((0, 1, 0, 1), (2, 4, 2, 4), cause=LIMITER)
    assert "raise `limit_all_gathers` to 4: " in _advice(refused)
    in_bytes = SETTINGS._replace(budget=GatherBudget(max_nbytes=10_000_000))
    assert 'raise `limit_all_gathers` to "18MB"' in _advice(refused, in_bytes)


def test_the_unit_whose_reduction_is_in_the_way_is_named() -> None:
    jobs = [
        _job("reduction", 6, 1, 9, TRANSFER, "backward"),
        _job("reduction", 5, 2, 10, TRANSFER, "backward"),
    ]
    record = Record(0, 0, 11, jobs, [Wait(1, 0, 2, 9)], num_backwards=1)
    assert "divide blocks.6 (8 MB) into smaller units" in _advice(record)
    assert 'in_flight="16MB"' in _advice(record)


def test_the_host_and_the_rank_that_is_waited_for_are_named() -> None:
    assert "keep the host free" in _advice(_forward((0, 9, 0, 9), cause=HOST_BOUND))
    peer = _forward((7, 9, 7, 9))
    peer.rank = 1
    text = _advice(_forward((0, 9, 0, 9)), r1=peer)
    assert text.startswith("give rank 1 less work")


def test_there_may_be_nothing_to_change() -> None:
    assert _advice(Record(0, 0, 1)) == "run at least one step inside the block"
    record = _forward((0, 0.1, 0.05, 0.1))
    record.end = 100.0
    assert _advice(record) == "nothing to change: 50 ms of a step of 100000 ms are exposed"
