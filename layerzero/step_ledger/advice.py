"""One sentence that says what to change, by the reason that costs most."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from layerzero.config import GatherBudget
from layerzero.step_ledger.figures import Explained
from layerzero.step_ledger.records import (
    HOST_BOUND,
    ISSUED_LATE,
    LIMITER,
    PEER_LATE,
    PREVIOUS,
    Record,
)

_NOT_WORTH = 0.02
"""Part of a step that may be exposed without advice."""


class Settings(NamedTuple):
    """Of the model, when the ledger was entered."""

    forward_depth: int
    prefetches_backward: bool
    budget: GatherBudget


def advise(explained: Explained, rank: int, settings: Settings) -> str:
    """The advice for the mean of all ranks; details are those of `rank`."""
    record, reasons = explained.records[rank], explained.reasons()
    exposed = sum(reasons.values())
    step_ms = (record.end - record.begin) * record.ms_per_step
    if not record.num_steps:
        return "run at least one step inside the block"
    if exposed < _NOT_WORTH * step_ms:
        return f"nothing to change: {_ms(exposed)} ms of a step of {_ms(step_ms)} ms are exposed"
    reason = max(reasons, key=lambda name: reasons[name])
    what = _change(reason, explained, rank, settings)
    return f"{what}: {_ms(reasons[reason])} ms of {_ms(exposed)} exposed"


def _ms(value: float) -> str:
    return f"{value:.1f}" if value < 10 else f"{value:.0f}"


def _change(reason: str, explained: Explained, rank: int, settings: Settings) -> str:
    if reason == ISSUED_LATE:
        return _ask_earlier(explained, rank, settings)
    if reason == LIMITER:
        return _larger_budget(explained.records[rank], settings.budget)
    if reason == PREVIOUS:
        return _smaller_reductions(explained, rank)
    if reason == HOST_BOUND:
        return (
            "keep the host free inside forward and backward: calls that block it, or that keep "
            "Python's lock, let it issue collectives late"
        )
    if reason == PEER_LATE:
        rows = explained.rank_rows(dict.fromkeys(explained.records, 0.0))
        worst = max(rows, key=lambda row: row.waited_for_ms)
        return f"give rank {worst.rank} less work, or find what keeps it: the others wait for it"
    return (
        "compute is too short to hide the transfers: larger batches, bfloat16, a smaller "
        "`zero3_size`, or a deeper `forward_prefetch` where units differ in size"
    )


def _ask_earlier(explained: Explained, rank: int, settings: Settings) -> str:
    record = explained.records[rank]
    late: dict[str, float] = defaultdict(float)
    for index, seconds in explained.seconds_of(rank, ISSUED_LATE):
        is_first = _is_first_of_pass(record, record.waits[index].job)
        late["first" if is_first else record.jobs[record.waits[index].job].phase] += seconds
    worst = max(late, key=lambda kind: late[kind], default="first")
    if worst == "forward" and not settings.forward_depth:
        return "set `forward_prefetch=1`"
    if worst == "backward" and not settings.prefetches_backward:
        return "set `backward_prefetch=BackwardPrefetch.BACKWARD_PRE`"
    if worst == "first":
        return (
            "make the first unit of forward and of backward smaller, or keep it full "
            "(`reshard_after_forward=False`), as nothing hides its gather"
        )
    return (
        "call units in the same order in each step, and enter the ledger after two steps: only a "
        "recorded order is prefetched"
    )


def _is_first_of_pass(record: Record, index: int) -> bool:
    """Whether no gather of the same pass was asked for before."""
    asked = record.jobs[index].asked
    begins = (span.begin for span in record.slices if not span.unit and span.begin <= asked)
    earlier = (job.asked for job in reversed(record.jobs[:index]) if job.kind == "gather")
    return next(earlier, float("-inf")) < max(begins, default=0.0)


def _larger_budget(record: Record, budget: GatherBudget) -> str:
    if budget.max_units is not None:
        return f"raise `limit_all_gathers` to {budget.max_units + 1}"
    largest = max((job.nbytes for job in record.jobs if job.kind == "gather"), default=0)
    return f'raise `limit_all_gathers` to "{((budget.max_nbytes or 0) + largest) / 1e6:.0f}MB"'


def _smaller_reductions(explained: Explained, rank: int) -> str:
    record = explained.records[rank]
    blocking: dict[int, float] = defaultdict(float)
    for index, seconds in explained.seconds_of(rank, PREVIOUS):
        before = range(record.waits[index].blocker, -1, -1)
        reduction = next((i for i in before if record.jobs[i].kind == "reduction"), None)
        if reduction is not None:
            blocking[reduction] += seconds
    if not blocking:
        return "divide units into smaller ones"
    worst = record.jobs[max(blocking, key=lambda index: blocking[index])]
    return (
        f"divide {worst.unit} ({worst.nbytes / 1e6:.3g} MB) into smaller units, or allow several "
        f'reductions in flight (`ReductionPolicy(in_flight="{2 * worst.nbytes / 1e6:.0f}MB")`)'
    )
