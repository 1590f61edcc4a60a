"""Places: where in a forward regions were entered before. Pure Python, no torch.

A place lies between two required gathers. Ranks come to the same places in the same order, so they
learn the same, and all know without asking whether they exchange at one.
"""

from __future__ import annotations

from collections.abc import Hashable

_Seen = dict[int, set[int]]
"""Region -> the numbers of its places on one path of required gathers."""


class Places:
    """Follows one forward at a time, and learns from it when the next one begins."""

    def __init__(self, regions: frozenset[int], is_known_ever: bool = True) -> None:
        """`is_known_ever`: False: regions may come anywhere, so ranks exchange at every place."""
        self._regions, self._is_known_ever = regions, is_known_ever
        self._paths: dict[Hashable, dict[tuple[int, ...], _Seen]] = {}
        """Kind -> the paths that forwards of this kind took."""
        self._has_ended = False
        """Whether the latest forward has ended, and nothing has failed since."""

    def begin(self, kind: Hashable) -> None:
        """A forward begins, so the one before is not taken back any more."""
        if self._has_ended:
            seen = self._of_kind.setdefault(tuple(self._path), {})
            for region, numbers in self._came.items():
                seen.setdefault(region, set()).update(numbers)
        self._has_ended = False
        self._of_kind: dict[tuple[int, ...], _Seen] = self._paths.setdefault(kind, {})
        self._open = [*self._of_kind.items()]
        """Paths that began as the open forward."""
        self._path: list[int] = []
        self._came: _Seen = {}

    def required(self, gather: int) -> None:
        """The forward comes to the gather of a required unit."""
        number = len(self._path)
        self._open = [each for each in self._open if each[0][number : number + 1] == (gather,)]
        self._path.append(gather)

    def happened(self, region: int) -> None:
        self._came.setdefault(region, set()).add(len(self._path))

    @property
    def exchanges(self) -> bool:
        """Whether ranks exchange here: no path is known, or one that a region came here on, or one
        that has not seen every region, each at one place (one with several may have more)."""
        return not self._open or any(
            not (self._is_known_ever and self._regions <= seen.keys())
            or any(len(numbers) > 1 or len(self._path) in numbers for numbers in seen.values())
            for _, seen in self._open
        )

    def leaves_with(self, gather: int | None) -> bool:
        """Whether no forward went on from here with this gather (None: ended): on a path that ranks
        do not know they exchange at once."""
        number, rest = len(self._path), () if gather is None else (gather,)
        return all(path[number : number + 1] != rest for path, _ in self._open)

    def end(self) -> None:
        self._has_ended = True

    def abort(self) -> None:
        """Do not learn from the open forward, or the one that ended last."""
        self._has_ended = False
