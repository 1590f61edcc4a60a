"""The table of the fault matrix in docs/reference/reliability.md."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from pathlib import Path

from tests.faults.cells import FAULTS, PLACES, SECONDS, meaning
from tests.faults.judge import Verdict

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "reliability.md"
_BEGIN = "<!-- written by make faults -->\n"
_END = "<!-- end -->\n"


def write(verdicts: list[Verdict], num_again: int) -> None:
    """Replace the part of the page between its two marks."""
    before, _, rest = PAGE.read_text().partition(_BEGIN)
    after = rest.partition(_END)[2]
    PAGE.write_text(before + _BEGIN + "\n" + table(verdicts, num_again) + "\n" + _END + after)


def table(verdicts: list[Verdict], num_again: int) -> str:
    halves = [verdict.half_sent for verdict in verdicts if verdict.half_sent is not None]
    seconds = [verdict.seconds for verdict in verdicts if verdict.how == "error"]
    lines = [
        f"{len(verdicts)} cells; {num_again} passed only when run once more, alone. Errors came "
        f"after {statistics.median(seconds):.1f} s (median), at most {max(seconds):.1f} s. Of "
        f"{len(halves)} strikes in a large message {sum(halves)} found it half sent.\n",
        "| fault | " + " | ".join(PLACES) + " |",
        "|---" * (len(PLACES) + 1) + "|",
    ]
    for fault in FAULTS:
        row = [_entry(verdicts, fault, place, ("",)) for place in PLACES]
        lines.append(f"| {fault} | " + " | ".join(row) + " |")
    for second in SECONDS[1:]:
        row = [_entry(verdicts, None, place, (second,)) for place in PLACES]
        lines.append(f"| two ranks: {second} | " + " | ".join(row) + " |")
    return "\n".join(lines) + "\n"


def _entry(verdicts: list[Verdict], fault: str | None, place: str, seconds: Iterable[str]) -> str:
    chosen = [
        each
        for each in verdicts
        if each.cell.fault == (fault or each.cell.fault)
        and each.cell.place == place
        and each.cell.second in seconds
    ]
    if not chosen:
        assert fault is not None
        return meaning(fault, place) or ""
    how = "/".join(sorted({each.how for each in chosen}))
    times = [each.seconds for each in chosen]
    return f"{how} {statistics.median(times):.1f}, {max(times):.1f}"
