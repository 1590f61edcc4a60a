"""Waits are cut where their cause changes, and clocks of ranks are brought together."""

import itertools

import pytest

from layerzero.step_ledger.figures import LastPeers, explain
from layerzero.step_ledger.records import (
    HOST_BOUND,
    ISSUED_LATE,
    LIMITER,
    PEER_LATE,
    PREVIOUS,
    TRANSFER,
    Hop,
    Job,
    Record,
    Wait,
)
from tests.harness.checks import of_floats


def _gather(number: int, asked: float, called: float, arrived: float, cause: str = TRANSFER) -> Job:
    hop = Hop(number, "all-gather", (0, 1), 100, called, called, arrived, arrived)
    return Job("gather", f"unit {number}", asked, cause, [hop])


def _reduction(number: int, asked: float, called: float, arrived: float, done: float) -> Job:
    hop = Hop(number, "reduce-scatter", (0, 1), 100, called, called, arrived, done)
    return Job("reduction", f"unit {number}", asked, TRANSFER, [hop])


def _causes(record: Record, wait: int = 0, peer: Record | None = None) -> list[tuple[str, float]]:
    records = {0: record} if peer is None else {0: record, 1: peer}
    segments = explain(record, record.waits[wait], LastPeers(records))
    whole = record.waits[wait]
    assert sum(s.seconds for s in segments) == of_floats(whole.end - whole.begin)
    # Neighbours with one reason count as one.
    return [
        (reason, round(sum(s.seconds for s in same), 6))
        for reason, same in itertools.groupby(segments, lambda segment: segment.reason)
    ]


def _peer(*issued: tuple[int, float]) -> Record:
    jobs = [_gather(number, at, at, at + 1) for number, at in issued]
    return Record(1, 0, 100, jobs=jobs)


def test_a_wait_is_for_the_last_peer_until_it_issued_and_then_for_the_transfer() -> None:
    record = Record(0, 0, 100, [_gather(7, 1, 1, 9)], [Wait(0, 0, 3, 9)])
    assert _causes(record) == [(TRANSFER, 6)]
    assert _causes(record, peer=_peer((7, 5))) == [(PEER_LATE, 2), (TRANSFER, 4)]
    # It issued before this rank waited; or its clock says after the data came.
    assert _causes(record, peer=_peer((7, 2))) == [(TRANSFER, 6)]
    assert _causes(record, peer=_peer((7, 12))) == [(PEER_LATE, 6)]


@pytest.mark.parametrize("cause", [ISSUED_LATE, LIMITER])
def test_a_gather_that_was_issued_late_keeps_that_reason(cause: str) -> None:
    record = Record(0, 0, 100, [_gather(7, 3, 3, 9, cause)], [Wait(0, 0, 3, 9)])
    assert _causes(record, peer=_peer((7, 5))) == [(PEER_LATE, 2), (cause, 4)]


def test_a_gather_that_is_queued_behind_a_reduction_waits_for_it() -> None:
    jobs = [_reduction(6, 1, 1, 6, 7), _gather(7, 2, 7, 9)]
    assert _causes(Record(0, 0, 100, jobs, [Wait(1, 1, 3, 9)])) == [(PREVIOUS, 4), (TRANSFER, 2)]
    # The reduction itself waited for a peer, which came to it at 5.
    peer = Record(1, 0, 100, [_reduction(6, 1, 5, 6, 7), _gather(7, 2, 7, 9)])
    causes = _causes(Record(0, 0, 100, jobs, [Wait(1, 1, 3, 9)]), peer=peer)
    assert causes == [(PEER_LATE, 2), (PREVIOUS, 2), (TRANSFER, 2)]
    # The host came to it a second late.
    jobs = [_reduction(6, 1, 1, 6, 7), _gather(7, 2, 8, 9.5)]
    causes = [(PREVIOUS, 4), (HOST_BOUND, 1), (TRANSFER, 1.5)]
    assert _causes(Record(0, 0, 100, jobs, [Wait(1, 1, 3, 9.5)])) == causes
    # A reduction of the step before is not in flight.
    jobs = [_reduction(6, 0, 0, 1, 1.5), _gather(7, 2, 2, 9)]
    assert _causes(Record(0, 0, 100, jobs, [Wait(1, 1, 3, 9)])) == [(TRANSFER, 6)]


def test_a_reduction_waits_for_the_one_before_it_and_at_the_end_for_itself() -> None:
    jobs = [_reduction(6, 1, 1, 8, 9), _reduction(7, 2, 9, 11, 12)]
    record = Record(0, 0, 100, jobs, [Wait(1, 0, 3, 9), Wait(1, 1, 10, 12)])
    peer = Record(1, 0, 100, [_reduction(6, 1, 4, 8, 9), _reduction(7, 2, 2, 11, 12)])
    assert _causes(record, 0, peer) == [(PEER_LATE, 1), (PREVIOUS, 5)]
    assert _causes(record, 1, peer) == [(TRANSFER, 2)]


def test_a_device_waits_for_the_host_and_for_reductions_of_the_same_group() -> None:
    gather = _gather(7, 2, 5, 9)
    gather.hops[0].issued = 6.0  # The lane comes to it after the host has queued it.
    record = Record(0, 0, 100, [gather], [Wait(0, 0, 3, 9)])
    assert _causes(record) == [(HOST_BOUND, 2), (TRANSFER, 4)]
    behind = [_reduction(6, 1, 1, 8, 8), _gather(7, 2, 2, 9)]
    behind[1].hops[0].issued = 2.5
    record = Record(0, 0, 100, behind, [Wait(1, 1, 3, 9)])
    assert _causes(record) == [(PREVIOUS, 5), (TRANSFER, 1)]
