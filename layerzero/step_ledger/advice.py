"""One sentence that says what to change, by the reason that costs most."""

from __future__ import annotations

from layerzero.step_ledger.figures import Explained
from layerzero.step_ledger.records import (
    HOST_BOUND,
    ISSUED_LATE,
    LIMITER,
    PEER_LATE,
    PREVIOUS,
    TRANSFER,
)

_NOT_WORTH = 0.02
"""Part of a step that may be exposed without advice."""
_CHANGES = {
    ISSUED_LATE: "have units gathered ahead: `forward_prefetch` and `backward_prefetch` on, units "
    "called in the same order in each step, two steps before the ledger; the first unit of each "
    "pass, whose gather nothing hides, small or full (`reshard_after_forward=False`)",
    LIMITER: "raise `limit_all_gathers`",
    PREVIOUS: "divide units into smaller ones, {unit} first, or allow several reductions in flight "
    '(`ReductionPolicy(in_flight="512MB")`)',
    HOST_BOUND: "keep the host free inside forward and backward: calls that block it, or that keep "
    "Python's lock, let it issue collectives late",
    PEER_LATE: "give rank {rank} less work, or find what keeps it: the others wait for it",
    TRANSFER: "compute is too short to hide the transfers: larger batches, bfloat16, a smaller "
    "`zero3_size`, or a deeper `forward_prefetch` where units differ in size",
}


def advise(explained: Explained, rank: int) -> str:
    """The advice for the mean of all ranks; `unit` is the largest that `rank` reduced."""
    record, reasons = explained.records[rank], explained.reasons()
    exposed = sum(reasons.values())
    step_ms = (record.end - record.begin) * record.ms_per_step
    if not record.num_steps:
        return "run at least one step inside the block"
    if exposed < _NOT_WORTH * step_ms:
        return f"nothing to change: {_ms(exposed)} ms of a step of {_ms(step_ms)} ms are exposed"
    reason = max(reasons, key=lambda name: reasons[name])
    reductions = [job for job in record.jobs if job.kind == "reduction"]
    what = _CHANGES[reason].format(
        rank=max(explained.rank_rows(), key=lambda row: row.waited_for_ms).rank,
        unit=max(reductions, key=lambda job: job.nbytes).unit if reductions else "the largest",
    )
    return f"{what}: {_ms(reasons[reason])} ms of {_ms(exposed)} exposed"


def _ms(value: float) -> str:
    return f"{value:.1f}" if value < 10 else f"{value:.0f}"
