"""A ledger as text, and one sentence that says what to change, by the reason that costs most."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from layerzero.notices import columns, some
from layerzero.step_ledger.figures import Explained, UnitRow
from layerzero.step_ledger.records import (
    HOST_BOUND,
    ISSUED_LATE,
    LIMITER,
    PEER_LATE,
    PREVIOUS,
    TRANSFER,
)

_MAX_UNITS = 40
_SMALL = 0.005
"""Milliseconds below which a reason is not printed."""
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
Columns = Sequence[tuple[str, Callable[[Any], str]]]
"""Titles, and what stands below them for a row."""


def _number(name: str, scale: float = 1.0, digits: int = 2) -> Callable[[Any], str]:
    return lambda row: f"{getattr(row, name) * scale:.{digits}f}"


_UNITS: Columns = [
    ("unit", lambda row: row.fqn or "(root)"),
    ("gather ms", _number("gather_ms")),
    ("exposed", _number("exposed_gather_ms")),
    ("MB", _number("gather_bytes", 1e-6)),
    ("reduce ms", _number("reduce_ms")),
    ("exposed", _number("exposed_reduce_ms")),
    ("MB", _number("reduce_bytes", 1e-6)),
    ("why", lambda row: _reasons_text(row.reasons)),
]
_GROUPS: Columns = [
    ("process group", lambda row: some(map(str, row.ranks))),
    ("MB sent", _number("bytes", 1e-6)),
    ("ms under way", _number("seconds", 1e3)),
    ("GB/s", lambda row: f"{row.bytes / row.seconds / 1e9:.2f}" if row.seconds else "-"),
]
_RANKS: Columns = [
    ("rank", lambda row: str(row.rank)),
    ("step ms", _number("step_ms")),
    ("compute", _number("compute_ms")),
    ("exposed", lambda row: f"{_exposed(row):.2f}"),
    ("others waited for it", _number("waited_for_ms")),
    ("clock error ms", _number("clock_error_ms", digits=3)),
]


def as_text(ledger: Any) -> str:
    """`ledger`: a `Ledger`, which lies above this file."""
    rows: list[UnitRow] = ledger.units
    hidden = sorted(rows, key=_exposed)
    left_out = {id(row) for row in hidden[: max(len(rows) - _MAX_UNITS, 0)]}
    lines = [
        f"rank {ledger.rank} of {len(ledger.ranks)}, mean of {ledger.num_steps} "
        f"step{'s' * (ledger.num_steps != 1)}: {ledger.step_ms:.2f} ms, of which "
        f"{sum(map(_exposed, rows)):.2f} ms are exposed communication",
        "  ".join(f"{name} {ms:.2f}" for name, ms in ledger.parts.items()),
        "",
        *_table(_UNITS, [row for row in rows if id(row) not in left_out]),
    ]
    if left_out:
        lines.append(f"(units with less exposed time, in `ledger.units` alone: {len(left_out)})")
    lines += ["", *_table(_GROUPS, ledger.groups), "", *_table(_RANKS, ledger.ranks), ""]
    return "\n".join([*lines, f"advice: {ledger.advice}"])


def _exposed(row: Any) -> float:
    return float(row.exposed_gather_ms + row.exposed_reduce_ms)


def _reasons_text(reasons: dict[str, float]) -> str:
    worst_first = sorted(reasons.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {ms:.2f}" for name, ms in worst_first if ms >= _SMALL)


def _table(of: Columns, rows: Iterable[Any]) -> list[str]:
    table = [
        [title for title, _ in of],
        *([text(row) for _, text in of] for row in rows),
    ]
    return columns(table, (0, len(of) - 1))


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
