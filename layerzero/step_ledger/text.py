"""A ledger as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from layerzero.step_ledger.figures import GroupRow, RankRow, UnitRow

_MAX_UNITS = 40
_SMALL = 0.005
"""Milliseconds below which a reason is not printed."""


class Figures(NamedTuple):
    """What is printed: the properties of `Ledger` with these names."""

    rank: int
    num_steps: int
    step_ms: float
    parts: dict[str, float]
    units: list[UnitRow]
    groups: list[GroupRow]
    ranks: list[RankRow]
    advice: str


def as_text(ledger: Figures) -> str:
    rows = ledger.units
    exposed = sum(row.exposed_gather_ms + row.exposed_reduce_ms for row in rows)
    ranks = ledger.ranks
    lines = [
        f"rank {ledger.rank} of {len(ranks)}, mean of {ledger.num_steps} steps: "
        f"{ledger.step_ms:.2f} ms, of which {exposed:.2f} ms are exposed communication",
        "  ".join(f"{name} {ms:.2f}" for name, ms in ledger.parts.items()),
        "",
        *_units(ledger),
        "",
        *_table(
            ["process group", "MB sent", "ms under way", "GB/s"],
            [
                [
                    _ranks_text(group.ranks),
                    f"{group.bytes / 1e6:.2f}",
                    f"{group.seconds * 1e3:.2f}",
                    f"{group.bytes / group.seconds / 1e9:.2f}" if group.seconds else "-",
                ]
                for group in ledger.groups
            ],
        ),
        "",
        *_table(
            ["rank", "step ms", "compute", "exposed", "others waited for it", "clock error ms"],
            [
                [
                    str(row.rank),
                    f"{row.step_ms:.2f}",
                    f"{row.compute_ms:.2f}",
                    f"{row.exposed_gather_ms + row.exposed_reduce_ms:.2f}",
                    f"{row.waited_for_ms:.2f}",
                    f"{row.clock_error_ms:.3f}",
                ]
                for row in ranks
            ],
        ),
        "",
        f"advice: {ledger.advice}",
    ]
    return "\n".join(lines)


def _units(ledger: Figures) -> list[str]:
    rows = ledger.units
    hidden = sorted(rows, key=lambda row: row.exposed_gather_ms + row.exposed_reduce_ms)
    left_out = {id(row) for row in hidden[: max(len(rows) - _MAX_UNITS, 0)]}
    lines = _table(
        ["unit", "gather ms", "exposed", "MB", "reduce ms", "exposed", "MB", "why"],
        [
            [
                row.fqn or "(root)",
                f"{row.gather_ms:.2f}",
                f"{row.exposed_gather_ms:.2f}",
                f"{row.gather_bytes / 1e6:.2f}",
                f"{row.reduce_ms:.2f}",
                f"{row.exposed_reduce_ms:.2f}",
                f"{row.reduce_bytes / 1e6:.2f}",
                _reasons_text(row.reasons),
            ]
            for row in rows
            if id(row) not in left_out
        ],
    )
    if left_out:
        lines.append(f"({len(left_out)} units with less exposed time are in `ledger.units`)")
    return lines


def _reasons_text(reasons: dict[str, float]) -> str:
    worst_first = sorted(reasons.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {ms:.2f}" for name, ms in worst_first if ms >= _SMALL)


def _ranks_text(ranks: Sequence[int]) -> str:
    if len(ranks) > 8:
        return f"{ranks[0]}, {ranks[1]}, ... {ranks[-1]} ({len(ranks)})"
    return ", ".join(map(str, ranks))


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]

    def line(row: list[str]) -> str:
        # The first and the last column are text.
        cells = [
            text.ljust(width) if index in (0, len(row) - 1) and index != 1 else text.rjust(width)
            for index, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    return [line(head), *(line(row) for row in rows)]
