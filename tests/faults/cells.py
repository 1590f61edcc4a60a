"""The cells of the fault matrix: which fault, where it strikes, and whom."""

import random
import zlib
from dataclasses import dataclass
from itertools import product

FAULTS = {
    "SIGKILL": "error",
    "SIGSEGV": "error",
    "SIGSTOP, SIGCONT in time": "recovery",
    "SIGSTOP, SIGCONT too late": "error",
    "GIL held briefly": "recovery",
    "GIL held too long": "error",
    "a socket closed": "error",
    "abort() of the group": "either",
    "a message half sent": "error",
    "disk full": "refused",
}
"""How a cell with the fault must end. "refused": as CheckpointError, and the run goes on."""

PLACES = (
    "gather",
    "reduction",
    "presence exchange",
    "clip",
    "save: exchange",
    "save: new group",
    "save: file",
    "load: exchange",
    "load: file",
    "construction: exchange",
    "construction: broadcast",
    "construction: new group",
    "between steps",
)
POSITIONS = ("first", "last", "random", "store")
SECONDS = ("", "two at once", "one while the first is diagnosed")
"""Whether a second rank fails, too."""
FATAL = ("SIGKILL", "SIGSEGV")
WORLD_SIZE = 3


@dataclass(frozen=True)
class Cell:
    fault: str
    place: str
    position: str
    """"store": the rank that serves torch's store. Elsewhere a file does, which cannot die."""
    second: str = ""
    timeout_s: float = 4.0
    report_s: float = 5.0

    def __str__(self) -> str:
        return " / ".join(filter(None, (self.fault, self.place, self.position, self.second)))

    @property
    def world_size(self) -> int:
        return WORLD_SIZE + bool(self.second)

    @property
    def victims(self) -> tuple[int, ...]:
        """Ranks that are struck; with a second one, that one last."""
        generator = random.Random(zlib.crc32(str(self).encode()))
        first = {
            "first": 0,
            "last": self.world_size - 1,
            "random": generator.randrange(self.world_size),
            "store": self.store_rank,
        }[self.position]
        assert first is not None
        others = [rank for rank in range(self.world_size) if rank != first]
        return (first, generator.choice(others)) if self.second else (first,)

    @property
    def store_rank(self) -> int | None:
        """Rank that serves the store; None: a file does."""
        return 1 if self.position == "store" else None

    @property
    def expected(self) -> str:
        return FAULTS[self.fault]


def meaning(fault: str, place: str) -> str | None:
    """Why a fault cannot strike at a place; None: it can."""
    if fault == "disk full" and place != "save: file":
        return "writes no file"
    at_files = place.endswith("file") or place.endswith("new group")
    if fault == "a message half sent" and (at_files or place == "between steps"):
        return "sends no message"
    return None


def all_cells() -> list[Cell]:
    cells = [
        Cell(fault, place, position)
        for fault, place, position in product(FAULTS, PLACES, POSITIONS)
        if meaning(fault, place) is None
    ]
    for second, fault, place in product(SECONDS[1:], FAULTS, PLACES):
        is_told = FAULTS[fault] == "error" and meaning(fault, place) is None
        if is_told and (second == "two at once" or fault in FATAL):
            cells.append(Cell(fault, place, "random", second))
    return cells


def some_cells() -> list[Cell]:
    """Each fault, and each place, once or twice."""
    faults = list(FAULTS)
    chosen = []
    for number, place in enumerate(PLACES):
        fits = [fault for fault in faults if meaning(fault, place) is None]
        chosen.append(Cell("SIGKILL", place, POSITIONS[number % 4]))
        chosen.append(Cell(fits[number % len(fits)], place, POSITIONS[(number + 1) % 4]))
    chosen.append(Cell("disk full", "save: file", "random"))
    chosen += [Cell("SIGKILL", "gather", "random", second) for second in SECONDS[1:]]
    return list(dict.fromkeys(chosen))
