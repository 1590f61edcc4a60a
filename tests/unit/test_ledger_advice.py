"""The advice names what to change for the reason that costs most."""

from __future__ import annotations

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
from layerzero.step_ledger.text import advise


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


def _advice(record: Record, **peers: Record) -> str:
    records = {0: record, **{int(name[1:]): peer for name, peer in peers.items()}}
    return advise(Explained(records), 0)


def test_the_change_for_the_reason_that_costs_most_is_named() -> None:
    even = [(max(i - 1, 0) * 4, i * 4 + 4, i * 4 + 1, i * 4 + 4) for i in range(5)]
    assert "compute is too short to hide the transfers" in _advice(_forward(*even))
    for cause, text in (
        (ISSUED_LATE, "have units gathered ahead"),
        (LIMITER, "raise `limit_all_gathers`: "),
        (HOST_BOUND, "keep the host free"),
    ):
        assert _advice(_forward((0, 9, 0, 9), cause=cause)).startswith(text)
    jobs = [
        _job("reduction", 6, 1, 9, TRANSFER, "backward"),
        _job("reduction", 5, 2, 10, TRANSFER, "backward"),
    ]
    record = Record(0, 0, 11, jobs, [Wait(1, 0, 2, 9)], num_backwards=1)
    assert "divide units into smaller ones, blocks.6 first" in _advice(record)
    peer = _forward((7, 9, 7, 9))
    peer.rank = 1
    assert _advice(_forward((0, 9, 0, 9)), r1=peer).startswith("give rank 1 less work")


def test_there_may_be_nothing_to_change() -> None:
    assert _advice(Record(0, 0, 1)) == "run at least one step inside the block"
    record = _forward((0, 0.1, 0.05, 0.1))
    record.end = 100.0
    assert _advice(record) == "nothing to change: 50 ms of a step of 100000 ms are exposed"
