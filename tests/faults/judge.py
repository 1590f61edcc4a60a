"""Runs one cell, and decides whether it ended as it must."""

import functools
import re
import signal
import tempfile
from dataclasses import replace
from pathlib import Path

from tests.faults.cells import Cell
from tests.faults.live import Outcome, live
from tests.harness.ranks import run_ranks

GRACE_S = 7.0
"""Added to the timeout: the time within which every survivor must have ended."""
_PATIENCE_S = 60.0
"""For a run without a fault."""


def problems_of(cell: Cell) -> list[str]:
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        folder = Path(name)
        killed = cell.victims if cell.fault == "SIGKILL" else ()
        dead = dict.fromkeys(killed, int(-signal.SIGKILL))
        try:
            outcomes = run_ranks(
                cell.world_size, live, cell, folder, True, timeout=60.0, expect_exit=dead
            )
        except AssertionError as error:
            return [str(error)]
        struck = {path.name for path in folder.glob("struck-*")}
    survivors = [each for each in outcomes if each and each.rank not in cell.victims]
    problems = list(_problems(cell, outcomes, survivors))
    if len(struck) != len(cell.victims):
        problems.append(f"struck only {sorted(struck)}")
    return problems


def _problems(cell: Cell, outcomes: list[Outcome | None], survivors: list[Outcome]) -> list[str]:
    found = []
    for each in survivors:
        found += [f"rank {each.rank}: {text}" for text in _problems_of(cell, each)]
    errors = [each.text for each in survivors if each.how == "error"]
    # With the store the survivors lose each other's reports: each names the rank it waits for.
    naming = any if cell.position == "store" else all
    names = [any(names_rank(text, rank) for rank in cell.victims) for text in errors]
    if errors and not naming(names) and not cannot_name(cell):
        found.append(f"does not name rank {cell.victims}: " + "; ".join(errors))
    for victim in cell.victims:
        told = outcomes[victim]
        if told is not None and told.how == "other error":
            found.append(f"struck rank {victim}: {told.text}")
    return found


def _problems_of(cell: Cell, each: Outcome) -> list[str]:
    found = []
    limit = cell.timeout_s + GRACE_S
    if each.seconds > limit:
        found.append(f"{each.how} after {each.seconds:.2f} s, more than {limit:g} s: {each.text}")
    if cell.expected not in (each.how, "either") or each.how == "other error":
        found.append(f"ended in {each.how}, not {cell.expected}: {each.text}")
    elif each.how == "error":
        if not re.search(
            r"^([a-z -]+ of .+ \(#\d+\)|creation of a process group .*): rank \d+ got no answer",
            each.text,
        ):
            found.append(f"does not name unit and operation: {each.text}")
        if not re.search(r"got no answer from (rank \d|the group)", each.text):
            found.append(f"names no rank: {each.text}")
    elif each.how == "refused":
        reason = rf"rank {cell.victims[0]}: .*No space left on device"
        if not re.search(reason, each.text, re.DOTALL):
            found.append(f"does not name the rank and the reason: {each.text}")
    expected = undisturbed(cell)[each.rank].losses[: len(each.losses)]
    if each.how != "error" and each.losses != expected:
        found.append("its losses are not those of an undisturbed run")
    return found


def cannot_name(cell: Cell) -> bool:
    """Ranks meet in the store to create a group: without it, who is missing is unknown."""
    return cell.position == "store" and cell.place.endswith("new group")


def names_rank(text: str, rank: int) -> bool:
    """Whether an error blames a rank: it is waited for, or it has no report."""
    return bool(re.search(rf"(from|waits for) rank {rank}\b|rank {rank}: no report", text))


def undisturbed(cell: Cell) -> list[Outcome]:
    """The same without a fault, and with time for a busy machine."""
    return _undisturbed(replace(cell, fault="SIGKILL", position="first", timeout_s=_PATIENCE_S))


@functools.cache
def _undisturbed(cell: Cell) -> list[Outcome]:
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        outcomes = run_ranks(cell.world_size, live, cell, Path(name), False, timeout=_PATIENCE_S)
    assert all(each.how == "recovery" for each in outcomes), outcomes
    return outcomes
