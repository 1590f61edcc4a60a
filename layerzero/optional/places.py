"""Places: where in a forward regions were entered before. Pure Python, no torch.

A place lies between two required gathers. Ranks come to the same places in the same order, so they
learn the same, and all know without asking whether they exchange at one.
"""

from __future__ import annotations

from collections.abc import Hashable

_NEVER_KNOWN = -1


class Places:
    """Follows one forward at a time, and learns from it when the next one begins."""

    def __init__(self, regions: frozenset[int], is_known_ever: bool = True) -> None:
        """`is_known_ever`: False: regions may come anywhere, so ranks exchange at every place."""
        self._regions = regions if is_known_ever else regions | {_NEVER_KNOWN}
        self._first: dict[Hashable, _Place] = {}
        """Kind -> the place where forwards of this kind begin."""
        self._kind: Hashable = None
        self._here: _Place | None = None
        self._ended: tuple[Hashable, list[int], dict[int, set[int]]] | None = None
        self.abort()

    def begin(self, kind: Hashable) -> None:
        """A forward begins, so the one before is not taken back any more."""
        if self._ended is not None:
            self._learn(*self._ended)
        self.abort()
        self._kind = kind
        self._here = self._first.get(kind)

    def required(self, gather: int) -> None:
        """The forward comes to the gather of a required unit."""
        self._trace.append(gather)
        self._here = self._here and self._here.after.get(gather)

    def happened(self, region: int) -> None:
        """All ranks gather a region here."""
        self._came.setdefault(len(self._trace), set()).add(region)

    @property
    def exchanges(self) -> bool:
        """Whether ranks exchange here."""
        return self._here is None or self._here.has_regions or not self._here.is_known

    def leaves_with(self, gather: int | None) -> bool:
        """Whether no forward went on from here with this gather (None: ended): on a path that ranks
        do not know they exchange at once."""
        if self._here is None:
            return True
        return gather not in self._here.after if gather is not None else self._here.seen is None

    def end(self) -> None:
        self._ended = self._kind, self._trace, self._came

    def abort(self) -> None:
        """Drop the open forward, or the one that ended last."""
        self._ended = None
        self._kind = self._here = None
        self._trace: list[int] = []
        self._came: dict[int, set[int]] = {}
        """Number of a place -> regions gathered there."""

    def _learn(self, kind: Hashable, trace: list[int], came: dict[int, set[int]]) -> None:
        path = [self._first.setdefault(kind, _Place())]
        for gather in trace:
            path.append(path[-1].after.setdefault(gather, _Place()))
        last = path[-1]
        last.seen = {} if last.seen is None else last.seen
        for number, regions in came.items():
            path[number].has_regions = True
            for region in regions:
                last.seen.setdefault(region, set()).add(number)
        for place in reversed(path):
            place.is_known = place.has_seen(self._regions) and all(
                [each.is_known for each in place.after.values()]
            )


class _Place:
    def __init__(self) -> None:
        self.after: dict[int, _Place] = {}
        """By the required gather that came next."""
        self.has_regions = False
        self.seen: dict[int, set[int]] | None = None
        """Of the forwards that ended here: each region, with the numbers of its places."""
        self.is_known = False
        """Whether every forward that passed here has seen every region, each at one place: one with
        several may have more."""

    def has_seen(self, regions: frozenset[int]) -> bool:
        seen = self.seen
        return seen is None or (
            regions <= seen.keys() and all([len(places) == 1 for places in seen.values()])
        )
