"""A ledger as text."""

from __future__ import annotations

from typing import Any

from layerzero.notices import columns
from layerzero.step_ledger.figures import UnitRow

_SMALL = 0.005
"""Milliseconds below which a reason is not printed."""
_UNITS = ("unit", "gather ms", "exposed", "MB", "reduce ms", "exposed", "MB", "why")
_RANKS = ("rank", "step ms", "compute", "exposed", "others waited for it", "clock error ms")


def as_text(ledger: Any) -> str:
    """`ledger`: a `Ledger`, which lies above this file."""
    rows: list[UnitRow] = ledger.units
    units = [_UNITS, *map(_unit_row, rows)]
    ranks: list[tuple[str, ...]] = [_RANKS]
    for row in ledger.ranks:
        numbers = _two_digits(row.step_ms, row.compute_ms, _exposed(row), row.waited_for_ms)
        ranks.append((str(row.rank), *numbers, f"{row.clock_error_ms:.3f}"))
    lines = [
        f"rank {ledger.rank} of {len(ledger.ranks)}, mean of {ledger.num_steps} "
        f"step{'s' * (ledger.num_steps != 1)}: {ledger.step_ms:.2f} ms, of which "
        f"{sum(map(_exposed, rows)):.2f} ms are exposed communication",
        "  ".join(f"{name} {ms:.2f}" for name, ms in ledger.parts.items()),
        "",
        *columns(units, (0, len(_UNITS) - 1)),
        "",
        *columns(ranks, (0,)),
    ]
    return "\n".join(lines)


def _unit_row(row: UnitRow) -> tuple[str, ...]:
    gather = row.gather_ms, row.exposed_gather_ms, row.gather_bytes * 1e-6
    reduction = row.reduce_ms, row.exposed_reduce_ms, row.reduce_bytes * 1e-6
    worst_first = sorted(row.reasons.items(), key=lambda item: -item[1])
    why = ", ".join(f"{name} {ms:.2f}" for name, ms in worst_first if ms >= _SMALL)
    return row.fqn or "(root)", *_two_digits(*gather, *reduction), why


def _two_digits(*values: float) -> list[str]:
    return [f"{value:.2f}" for value in values]


def _exposed(row: Any) -> float:
    return float(row.exposed_gather_ms + row.exposed_reduce_ms)
