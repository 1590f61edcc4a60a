"""One sentence that says what to change, by the reason that costs most."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from layerzero.config import GatherBudget
from layerzero.step_ledger.figures import Explained, length
from layerzero.step_ledger.records import (
    HOST_BOUND,
    ISSUED_LATE,
    LIMITER,
    PEER_LATE,
    PREVIOUS,
    TRANSFER,
    Job,
    Record,
)

_NOT_WORTH = 0.02
"""Part of a step that may be exposed without advice."""
_WORTH = 0.1
"""Part of the exposed time that a deeper prefetch has to save to be advised."""
_DEEPEST = 4


class Settings(NamedTuple):
    """Of the model, when the ledger was entered."""

    forward_depth: int
    prefetches_backward: bool
    budget: GatherBudget


def advise(explained: Explained, rank: int, settings: Settings) -> str:
    """The advice for the mean of all ranks; details are those of `rank`."""
    record, reasons = explained.records[rank], explained.reasons()
    exposed = sum(reasons.values())
    step_ms = (record.end - record.begin) * 1e3 / max(record.num_steps, 1)
    if not record.num_steps:
        return "run at least one step inside the block"
    if exposed < _NOT_WORTH * step_ms:
        return f"nothing to change: {_ms(exposed)} ms of a step of {_ms(step_ms)} ms are exposed"
    reason = max(reasons, key=lambda name: reasons[name])
    what = _ADVICE[reason](explained, rank, settings)
    saved = reasons[reason]
    if reason == TRANSFER:
        deeper = _deeper_prefetch(record, settings, _on_the_link(explained, rank))
        if deeper is not None and deeper[1] >= _WORTH * exposed:
            what, saved = f"raise `forward_prefetch` to {deeper[0]}", min(deeper[1], exposed)
    return f"{what}: {_ms(saved)} ms of {_ms(exposed)} exposed"


def _ms(value: float) -> str:
    return f"{value:.1f}" if value < 10 else f"{value:.0f}"


def _issued_late(explained: Explained, rank: int, settings: Settings) -> str:
    record = explained.records[rank]
    late: dict[str, float] = defaultdict(float)
    for wait, segments in zip(record.waits, explained.segments[rank], strict=True):
        job = record.jobs[wait.job]
        seconds = sum(each.seconds for each in segments if each.reason == ISSUED_LATE)
        kind = "first" if _is_first_of_pass(record, wait.job) else job.phase
        late[kind] += seconds
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
    phase = record.jobs[index].phase
    for job in reversed(record.jobs[:index]):
        if job.phase != phase:
            return True
        if job.kind == "gather":
            asked = record.jobs[index].asked
            begins = [s.begin for s in record.slices if not s.unit and s.begin <= asked]
            return job.asked < max(begins, default=0.0)
    return True


def _limiter(explained: Explained, rank: int, settings: Settings) -> str:
    budget = settings.budget
    if budget.max_units is not None:
        return f"raise `limit_all_gathers` to {budget.max_units + 1}"
    largest = max((j.nbytes for j in explained.records[rank].jobs if j.kind == "gather"), default=0)
    megabytes = ((budget.max_nbytes or 0) + largest) / 1e6
    return f'raise `limit_all_gathers` to "{megabytes:.0f}MB"'


def _previous(explained: Explained, rank: int, settings: Settings) -> str:
    record = explained.records[rank]
    blocking: dict[int, float] = defaultdict(float)
    for wait, segments in zip(record.waits, explained.segments[rank], strict=True):
        blocker = _reduction_before(record, wait.blocker)
        if blocker is not None:
            seconds = sum(each.seconds for each in segments if each.reason == PREVIOUS)
            blocking[blocker] += seconds
    worst: Job | None = None
    if blocking:
        worst = record.jobs[max(blocking, key=lambda index: blocking[index])]
    if worst is None:
        return "divide units into smaller ones"
    nbytes = 2 * worst.nbytes / 1e6
    return (
        f"divide {worst.unit} ({worst.nbytes / 1e6:.3g} MB) into smaller units, or allow several "
        f'reductions in flight (`ReductionPolicy(in_flight="{nbytes:.0f}MB")`)'
    )


def _reduction_before(record: Record, index: int) -> int | None:
    while index >= 0 and record.jobs[index].kind != "reduction":
        index -= 1
    return index if index >= 0 else None


def _host(explained: Explained, rank: int, settings: Settings) -> str:
    return (
        "keep the host free inside forward and backward: calls that block it, or that keep "
        "Python's lock, let it issue collectives late"
    )


def _peer(explained: Explained, rank: int, settings: Settings) -> str:
    rows = explained.rank_rows(dict.fromkeys(explained.records, 0.0))
    worst = max(rows, key=lambda row: row.waited_for_ms)
    return f"give rank {worst.rank} less work, or find what keeps it: the others wait for it"


def _transfer(explained: Explained, rank: int, settings: Settings) -> str:
    return (
        "compute is too short to hide the transfers: larger batches, bfloat16, or a smaller "
        "`zero3_size`"
    )


_ADVICE: dict[str, Callable[[Explained, int, Settings], str]] = {
    ISSUED_LATE: _issued_late,
    LIMITER: _limiter,
    PREVIOUS: _previous,
    HOST_BOUND: _host,
    PEER_LATE: _peer,
    TRANSFER: _transfer,
}


class _Use(NamedTuple):
    """One gather of a forward, in seconds."""

    transfer: float
    compute: float
    """Compute between its wait and the next one."""


def _on_the_link(explained: Explained, rank: int) -> dict[int, float]:
    """Seconds that each gather was under way, by its index, if the link carried one at a time."""
    record, seconds, reached = explained.records[rank], {}, 0.0
    gathers = [(i, job) for i, job in enumerate(record.jobs) if job.kind == "gather" and job.hops]
    for index, job in sorted(gathers, key=lambda each: each[1].end or 0.0):
        spans = explained.under_way(rank, job.hops)
        seconds[index] = length([(max(begin, reached), max(end, reached)) for begin, end in spans])
        reached = max([reached, *(end for _, end in spans)])
    return seconds


def _deeper_prefetch(
    record: Record, settings: Settings, transfers: dict[int, float]
) -> tuple[int, float] | None:
    """The depth that saves most, and the milliseconds of a step, if forwards ran like this."""
    passes = list(_forwards(record, transfers))
    if not passes or not settings.forward_depth:
        return None
    per_step = 1e3 / max(record.num_steps, 1)
    now = sum(_exposed(uses, settings.forward_depth) for uses in passes)
    depths = range(settings.forward_depth + 1, _DEEPEST + 1)
    saved = {d: (now - sum(_exposed(uses, d) for uses in passes)) * per_step for d in depths}
    if not saved:
        return None
    most = max(saved.values())
    # The smallest depth that brings almost all of it.
    depth = next(d for d in depths if saved[d] >= 0.9 * most)
    return depth, saved[depth]


def _forwards(record: Record, transfers: dict[int, float]) -> Iterator[list[_Use]]:
    for each in record.slices:
        if each.unit or each.phase != "forward":
            continue
        inside = [
            w
            for w in record.waits
            if each.begin <= w.begin < each.end and record.jobs[w.job].kind == "gather"
        ]
        ends = [*(w.begin for w in inside[1:]), each.end]
        yield [
            _Use(transfers.get(w.job, 0.0), max(end - w.end, 0.0))
            for w, end in zip(inside, ends, strict=True)
        ]


def _exposed(uses: Sequence[_Use], depth: int) -> float:
    """Seconds that compute waits if each gather is asked for `depth` units ahead, and the link
    carries one at a time."""
    now = link = exposed = 0.0
    arrived: list[float] = []
    for index, use in enumerate(uses):
        for ahead in range(len(arrived), min(index + depth + 1, len(uses))):
            link = max(link, now) + uses[ahead].transfer
            arrived.append(link)
        exposed += max(arrived[index] - now, 0.0)
        now = max(now, arrived[index]) + use.compute
    return exposed
