"""The cells of the fault matrix: which fault, where it strikes, and whom."""

import random
import zlib
from dataclasses import dataclass
from itertools import product

FAULTS = {
    "SIGKILL": "error",
    "SIGSTOP, SIGCONT in time": "recovery",
    "SIGSTOP, SIGCONT too late": "error",
    "a socket closed": "error",
    "abort() of the group": "either",
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


def all_cells() -> list[Cell]:
    cells = [
        Cell(fault, place, position)
        for fault, place, position in product(FAULTS, PLACES, POSITIONS)
        if fault != "disk full" or place == "save: file"
    ]
    return cells + [
        Cell("SIGKILL", place, "random", second) for second, place in product(SECONDS[1:], PLACES)
    ]
