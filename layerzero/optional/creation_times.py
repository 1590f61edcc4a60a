"""CreationTimes: when a node of autograd was created, on the clock of the root. Pure Python."""

from __future__ import annotations

from bisect import bisect_right

_MAX_CALLS = 1 << 14


class CreationTimes:
    """Start times of the latest calls, with the number of the next node at that time."""

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._times: list[int] = []

    def note(self, number: int, time: int) -> None:
        """A call begins at `time`; autograd gives the next node this number."""
        if (self._numbers and number < self._numbers[-1]) or len(self._times) == _MAX_CALLS:
            # Another thread, which numbers nodes by itself; or calls of long ago.
            self._numbers.clear()
            self._times.clear()
        self._numbers.append(number)
        self._times.append(time)

    def before(self, number: int) -> int | None:
        """The latest call that began before the node with this number was created, if known."""
        place = bisect_right(self._numbers, number)
        return self._times[place - 1] if place else None
