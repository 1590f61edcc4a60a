"""The table of the fault matrix in docs/reference/reliability.md."""

import statistics
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
        f"{len(verdicts)} cells; {num_again} of them passed only when run once more. "
        f"Errors came after {statistics.median(seconds):.1f} s (median), at most "
        f"{max(seconds):.1f} s. Of {len(halves)} strikes in a large message {sum(halves)} found it "
        "half sent.\n",
        "| fault | " + " | ".join(PLACES) + " |",
        "|---" * (len(PLACES) + 1) + "|",
    ]
    rows = [(fault, [fault], "") for fault in FAULTS]
    rows += [(f"two ranks: {second}", list(FAULTS), second) for second in SECONDS[1:]]
    for name, faults, second in rows:
        entries = [_entry(verdicts, faults, place, second) for place in PLACES]
        lines.append(f"| {name} | " + " | ".join(entries) + " |")
    return "\n".join(lines) + "\n"


def _entry(verdicts: list[Verdict], faults: list[str], place: str, second: str) -> str:
    chosen = [
        each
        for each in verdicts
        if each.cell.fault in faults and each.cell.place == place and each.cell.second == second
    ]
    if not chosen:
        return (meaning(faults[0], place) if len(faults) == 1 else None) or "no result"
    how = "/".join(sorted({each.how for each in chosen}))
    times = [each.seconds for each in chosen]
    return f"{how} {statistics.median(times):.1f}, {max(times):.1f}"
