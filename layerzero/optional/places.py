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

    def with_pass(self, events: Mapping[int, Sequence[int]]) -> _Script:
        """The script that also has these events; itself if none is new."""
        script = self
        for place, found in events.items():
            before = self.events.get(place, [])
            if found == before or Counter(found) <= Counter(before):
                continue
            if script is self:
                script = self._copy()
            # New ones come in the order just seen; those that did not come stay behind them.
            script.events[place] = [*found, *(event for event in before if event not in found)]
            for event in found:
                script.places_of.setdefault(event // 2, set()).add(place)
        return script

    def _copy(self) -> _Script:
        copy = _Script()
        copy.events = dict(self.events)
        copy.places_of = {unit: set(places) for unit, places in self.places_of.items()}
        return copy


class _Node:
    """A place that recorded passes of one kind came to on the same path.

    Each pass asks the same of the same places, so a node keeps what it has found out, until a pass
    teaches something new.
    """

    expected: list[int]
    """The optional events that came here before: in order, as often as they came."""
    following: frozenset[int | None]
    """The required collectives that recorded passes went on with; None: one ended here."""

    def __init__(self, scripts: Mapping[Path, _Script], place: int = 0) -> None:
        self.scripts = dict(scripts)
        self._place = place
        found = [script.events.get(place, []) for script in self.scripts.values()]
        longest = max(found, key=len, default=[])
        rest = dict.fromkeys(event for events in found for event in events)
        self.expected = [*longest, *(event for event in rest if event not in longest)]
        self.following = frozenset(
            path[place] if len(path) > place else None for path in self.scripts
        )
        self._after: dict[int, _Node] = {}
        self._is_known: dict[tuple[frozenset[int], bool], bool] = {}

    def after(self, collective: int) -> _Node:
        """The place behind this required collective."""
        if not self.scripts:
            return self
        node = self._after.get(collective)
        if node is None:
            place = self._place
            alike = (path[place : place + 1] == (collective,) for path in self.scripts)
            pairs = zip(self.scripts.items(), alike, strict=True)
            node = _Node(dict(item for item, goes_on in pairs if goes_on), place + 1)
            self._after[collective] = node
        return node

    def is_known(self, key: tuple[frozenset[int], bool]) -> bool:
        """Whether all these units have been seen in every pass recorded here.

        Args:
            key: the units, and whether one seen at several places may come at any other, too.
        """
        found = self._is_known.get(key)
        if found is None:
            needed, roam = key
            found = not needed or (
                bool(self.scripts)
                and all(
                    needed <= script.places_of.keys()
                    and not (roam and any(len(each) > 1 for each in script.places_of.values()))
                    for script in self.scripts.values()
                )
            )
            self._is_known[key] = found
        return found


class Places:
    """Follows one pass at a time, and learns from it."""

    place: int
    """Number of required collectives that the open pass has come to."""
    expected: list[int]
    """The optional events that came here before: in order, as often as they came."""
    is_known: bool
    """Whether all optional units have been seen in every recorded pass that may be this one."""
    came: set[int]
    """Required collectives and optional events that the open pass has come to."""
    last_event: int | None
    """The latest optional event of the open pass."""
    is_open: bool

    def __init__(self, max_kinds: int = 256) -> None:
        self._max_kinds = max_kinds
        self._known: dict[Hashable, _Node] = {}
        """Kind -> the place where passes of this kind begin."""
        self._nothing = _Node({})
        self._before: tuple[Hashable, _Node | None, dict[Hashable, _Node]] | None = None
        """What `take_back` restores: a kind, what was known of it, and what was dropped for it."""
        self._trace: list[int] = []
        self._events: dict[int, list[int]] = {}
        self._kind: Hashable = None
        self._key: tuple[frozenset[int], bool] = frozenset(), False
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
        self._key = frozenset(needed), roam
        node = self._known.pop(kind, None)
        if node is not None:
            self._known[kind] = node  # The latest kind is last.
        self._come_to(node or self._nothing)

    def _come_to(self, node: _Node) -> None:
        self._node = node
        self.expected = node.expected
        self.is_known = node.is_known(self._key)

    def required(self, collective: int) -> None:
        """The pass comes to a required collective."""
        self._trace.append(collective)
        self.came.add(collective)
        self.place += 1
        self._come_to(self._node.after(collective))

    def goes_on_with(self, collective: int | None) -> bool:
        """Whether a recorded pass went on from here with this required collective (None: ended)."""
        return collective in self._node.following

    @property
    def has_events(self) -> bool:
        """Whether an optional event has happened here."""
        return self.place in self._events

    @property
    def last_required(self) -> int | None:
        """The latest required collective."""
        return self._trace[-1] if self._trace else None

    @property
    def is_recorded(self) -> bool:
        """Whether a recorded pass began like the open one."""
        return bool(self._node.scripts)

    def ahead(self) -> Iterator[tuple[int, list[int]]]:
        """The required collectives that come next, as far as all recorded passes agree, each with
        the optional events expected behind it."""
        node = self._node
        while len(node.following) == 1:
            (collective,) = node.following
            if collective is None:
                return
            node = node.after(collective)
            yield collective, node.expected

    def happened(self, event: int) -> None:
        """All ranks take part in an optional event here."""
        self._events.setdefault(self.place, []).append(event)
        self.came.add(event)
        self.last_event = event

    @property
    def events(self) -> tuple[tuple[int, Path], ...]:
        """What has happened in the open pass: (place, events)."""
        return tuple((place, tuple(found)) for place, found in sorted(self._events.items()))

    def end(self, is_final: bool = True) -> None:
        """The pass has ended: learn from it.

        Args:
            is_final: whether `take_back` leaves what was learned.
        """
        self._before = None
        if not self.is_open:
            return
        before = self._known.get(self._kind)
        begin = before or self._nothing
        path = tuple(self._trace)
        script = begin.scripts.get(path)
        noted = (script or _Script()).with_pass(self._events)
        if noted is not script:
            begin = _Node({**begin.scripts, path: noted})
        self._known[self._kind] = begin
        dropped = {}
        if len(self._known) > self._max_kinds:
            oldest = next(iter(self._known))
            dropped[oldest] = self._known.pop(oldest)
        if not is_final:
            self._before = self._kind, before, dropped
        self.abort()

    def take_back(self) -> None:
        """Forget what the latest pass that ended has taught, unless that is final."""
        if self._before is None:
            return
        (kind, before, dropped), self._before = self._before, None
        if before is None:
            del self._known[kind]
        else:
            self._known[kind] = before
        self._known = {**dropped, **self._known}

    def abort(self) -> None:
        """Drop the open pass, if any."""
        self.is_open, self.place, self.last_event = False, 0, None
        self._trace, self._events, self.came = [], {}, set()
        self._kind = None
        self._key = frozenset(), False
        self._come_to(self._nothing)
