"""Places: where in a pass optional units came before. Pure Python, no torch.

A pass is a forward or a backward, of one kind. Required collectives and optional events are
integers: twice the unit's index for a gather, one more for a reduction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence

Path = tuple[int, ...]


class _Script:
    """Passes of one kind whose required collectives came in the same order."""

    def __init__(self) -> None:
        self.events: dict[int, list[int]] = {}
        """Place (number of required collectives before it) -> optional events, as last seen."""
        self.places_of: dict[int, set[int]] = {}
        """Optional unit -> places where one of its events was seen."""

    def note(self, events: Mapping[int, Sequence[int]]) -> None:
        for place, found in events.items():
            # New ones come in the order just seen; those that did not come stay behind them.
            before = self.events.get(place, [])
            if not Counter(found) <= Counter(before):
                self.events[place] = [*found, *(event for event in before if event not in found)]
            for event in found:
                self.places_of.setdefault(event // 2, set()).add(place)


class Places:
    """Follows one pass at a time, and learns from it."""

    place: int
    """Number of required collectives that the open pass has come to."""
    is_open: bool

    def __init__(self, max_kinds: int = 256) -> None:
        self._max_kinds = max_kinds
        self._known: dict[Hashable, dict[Path, _Script]] = {}
        self._trace: list[int] = []
        self._events: dict[int, list[int]] = {}
        self._candidates: dict[Path, _Script] = {}
        self._needed: frozenset[int] = frozenset()
        self._kind: Hashable = None
        self._roam = False
        self.abort()

    def begin(self, kind: Hashable, needed: Iterable[int], roam: bool) -> None:
        """Begin a pass.

        Args:
            needed: optional units that may come; all of them must have been seen before places
                without an exchange are trusted.
            roam: whether a unit seen at several places may come at any other, too.
        """
        self.abort()
        self.is_open = True
        self._kind = kind
        self._needed = frozenset(needed)
        self._roam = roam
        self._candidates = dict(self._known.get(kind, {}))

    def required(self, collective: int) -> None:
        """The pass comes to a required collective."""
        self._trace.append(collective)
        place = self.place
        self._candidates = {
            path: script
            for path, script in self._candidates.items()
            if len(path) > place and path[place] == collective
        }
        self.place = place + 1

    def goes_on_with(self, collective: int | None) -> bool:
        """Whether a recorded pass went on from here with this required collective (None: ended)."""
        place = self.place
        return any(
            len(path) == place if collective is None else path[place : place + 1] == (collective,)
            for path in self._candidates
        )

    @property
    def is_recorded(self) -> bool:
        """Whether a recorded pass began like the open one."""
        return bool(self._candidates)

    @property
    def is_known(self) -> bool:
        """Whether all optional units have been seen in every recorded pass that may be this one."""
        if not self._needed:
            return True
        return bool(self._candidates) and all(
            self._needed <= script.places_of.keys() and not self._roams(script)
            for script in self._candidates.values()
        )

    def _roams(self, script: _Script) -> bool:
        return self._roam and any(len(places) > 1 for places in script.places_of.values())

    def expected(self, place: int | None = None) -> list[int]:
        """The optional events that came here, or at a later place, before: in order, as often as
        they came."""
        place = self.place if place is None else place
        found = [script.events.get(place, []) for script in self._candidates.values()]
        longest = max(found, key=len, default=[])
        rest = dict.fromkeys(event for events in found for event in events)
        return [*longest, *(event for event in rest if event not in longest)]

    def ahead(self) -> Iterator[tuple[int, int]]:
        """The required collectives that come next, as far as all recorded passes agree, each with
        the place behind it."""
        place = self.place
        while True:
            found = {path[place : place + 1] for path in self._candidates}
            if len(found) != 1 or not (following := found.pop()):
                return
            place += 1
            yield following[0], place

    def has_come_to(self, collective: int) -> bool:
        """Whether the open pass has come to this required collective, or optional event."""
        return collective in self._trace or any(collective in e for e in self._events.values())

    def happened(self, event: int) -> None:
        """All ranks take part in an optional event here."""
        self._events.setdefault(self.place, []).append(event)

    @property
    def events(self) -> tuple[tuple[int, Path], ...]:
        """What has happened in the open pass: (place, events)."""
        return tuple((place, tuple(found)) for place, found in sorted(self._events.items()))

    def end(self) -> None:
        """The pass has ended: learn from it."""
        if not self.is_open:
            return
        scripts = self._known.pop(self._kind, {})
        self._known[self._kind] = scripts  # The latest kind is last.
        scripts.setdefault(tuple(self._trace), _Script()).note(self._events)
        if len(self._known) > self._max_kinds:
            del self._known[next(iter(self._known))]
        self.abort()

    def abort(self) -> None:
        """Drop the open pass, if any."""
        self.is_open, self.place = False, 0
        self._trace, self._events, self._candidates = [], {}, {}
        self._needed, self._kind, self._roam = frozenset(), None, False
