"""A ledger as text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from layerzero.notices import columns
from layerzero.step_ledger.figures import UnitRow

_MAX_UNITS = 40
_SMALL = 0.005
"""Milliseconds below which a reason is not printed."""
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
    ("process group", lambda row: _ranks_text(row.ranks)),
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


def _ranks_text(ranks: Sequence[int]) -> str:
    if len(ranks) > 8:
        return f"{ranks[0]}, {ranks[1]}, ... {ranks[-1]} ({len(ranks)})"
    return ", ".join(map(str, ranks))


def _table(of: Columns, rows: Iterable[Any]) -> list[str]:
    table = [
        [title for title, _ in of],
        *([text(row) for _, text in of] for row in rows),
    ]
    return columns(table, (0, len(of) - 1))
