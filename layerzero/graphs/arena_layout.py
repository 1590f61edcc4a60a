"""Where buffers lie in an arena, computed from what passes took and gave back. Integers only.

Each take of a buffer in a pass has a place of its own, so each order is laid out by itself. Takes
form trees (`Take.next`): a pass may become any of the orders that begin like it, so these share
their first takes. Full buffers and reduction inputs are two branches: what is prefetched decides
when a gather starts between two reductions.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Mapping, Sequence, Set
from typing import Literal, NamedTuple

ALIGNMENT = 512
"""Bytes; what torch's allocators for devices align to. A cache line on the CPU has 64."""
TOLERANCES = (1.0, 1.0025, 1.005, 1.01, 1.02)
"""Bytes of a layout over the most that are taken at once, that are tried one after the other."""
_TRIES = 32
MOST_PLACES = 4
"""Places of one take, after which it is given no more."""


class Event(NamedTuple):
    """A unit (its index) is visited, or a buffer is taken or given back, in the host's order."""

    kind: Literal["visit", "take", "give"]
    number: int
    is_behind: bool = False
    """Whether it is taken only when the reductions in flight have given back their inputs."""


class Place(NamedTuple):
    start: int
    stop: int

    def overlaps(self, other: Place) -> bool:
        return self.start < other.stop and other.start < self.stop


class Take:
    """One take of a buffer in all passes that began alike; or the beginning of passes."""

    def __init__(self) -> None:
        self.places: list[Place] = []
        """Places in the order in which they are tried. More than one if buffers that one pass had
        given back stay in another."""
        self.next: dict[int, Take] = {}
        """The takes after this one, by buffer."""


class Pass(NamedTuple):
    """One forward or one backward."""

    kind: Hashable
    """Settings and forward order of a backward, by which it begins; None: a forward."""
    taken: Mapping[int, Take | None]
    """Buffers that are taken when it begins; None: by a pass that is not laid out yet."""
    events: Sequence[Event]


Roots = dict[tuple[Hashable, frozenset[Take | None]], Take]
"""Beginnings of passes, by kind and by what is taken when one takes its first buffer."""


def prune(roots: Roots, buffers: Container[int]) -> int:
    """Drop takes of other buffers. Returns the number of those that are left."""
    num_left, left = 0, [*roots.values()]
    while left:
        take = left.pop()
        take.next = {buffer: each for buffer, each in take.next.items() if buffer in buffers}
        left += take.next.values()
        num_left += len(take.next)
    return num_left


def cleaned(each: Pass, buffers: Container[int]) -> Pass:
    """The pass without other buffers, and without all but the last of several gives of one take: a
    reduction's thread gives its input back at any time, and later the host does, too."""
    kept, given = [], set[int]()
    for event in reversed(each.events):
        if event.kind == "visit":
            kept.append(event)
        elif event.number in buffers and (event.kind == "take" or event.number not in given):
            kept.append(event)
            (given.discard if event.kind == "take" else given.add)(event.number)
    taken = {buffer: take for buffer, take in each.taken.items() if buffer in buffers}
    return Pass(each.kind, taken, kept[::-1])


class Prefetching(NamedTuple):
    """Settings that decide which units a pass gathers ahead, once its order was recorded."""

    unit_of: Mapping[int, int]
    """Unit of each full buffer; reduction inputs have none."""
    nbytes: Mapping[int, int]
    """Bytes of each unit's full buffers."""
    forward_depth: int
    backward_depth: int
    when_done: bool
    """Whether backward prefetches when a unit is done (BACKWARD_POST), not when one is reached."""
    max_units: float
    max_nbytes: float
    is_behind: bool = True
    """Whether gathers prefetched when a unit is reached in backward start behind reductions."""


def with_prefetch(first: Pass, policy: Prefetching) -> Pass:
    """The pass as it will be once its order was recorded. What is visited is gathered earlier, and
    nothing else is: the first pass of an order may have prefetched by another one."""
    unit_of, in_backward = policy.unit_of, first.kind is not None
    depth = policy.backward_depth if in_backward else policy.forward_depth
    when_done = in_backward and policy.when_done
    visits = [event.number for event in first.events if event.kind == "visit"]
    taken, started, events = {*first.taken}, set[int](), list[Event]()
    resident = {unit_of[buffer] for buffer in taken if buffer in unit_of}
    visit = -1

    def start(number: int, is_behind: bool) -> None:
        started.add(number)
        resident.add(visits[number])
        buffers = [buffer for buffer, unit in unit_of.items() if unit == visits[number]]
        taken.update(buffers)
        events.extend(Event("take", buffer, is_behind) for buffer in buffers)

    def prefetch() -> None:
        for number in range(visit + 1, min(visit + 1 + depth, len(visits))):
            unit = visits[number]
            if number in started or unit in resident:
                continue
            nbytes = sum(policy.nbytes[each] for each in (*resident, unit))
            if len(resident) >= policy.max_units or nbytes > policy.max_nbytes:
                return
            start(number, in_backward and not when_done and policy.is_behind)

    if in_backward and not when_done:
        prefetch()  # Units that are still full are reached first, and prefetch as well.
    for event in first.events:
        if event.kind == "visit":
            visit += 1
            if visit not in started:
                start(visit, is_behind=False)
            if not when_done:
                prefetch()
        elif event.number not in unit_of or not visits:
            events.append(event)
        elif event.kind == "give" and event.number in taken:
            events.append(event)
            taken.discard(event.number)
            resident.discard(unit_of[event.number])
            if when_done:
                prefetch()
    return first._replace(events=events)


class Demand(NamedTuple):
    """Needs of passes, of an arena that they use."""

    conflicts: dict[Take, set[Take]]
    """Takes whose buffers are taken while that of another one is."""
    unplaced: dict[Take, int]
    """Takes that none of their places serve, and their bytes."""
    taken: dict[int, Take]
    """Buffers that are taken in the end."""
    peak: int
    """The most bytes that are taken at once."""


def demand(
    passes: Iterable[Pass],
    nbytes: Mapping[int, int],
    roots: Roots,
    inputs: Set[int] = frozenset(),
) -> Demand:
    """Follow passes that came one after the other through the arena. Adds their takes to `roots`.
    `nbytes`: of every buffer. `inputs`: buffers that are inputs of reductions."""
    conflicts: dict[Take, set[Take]] = {}
    unplaced: dict[Take, int] = {}
    taken: dict[int, Take] = {}
    lies: dict[Take, list[Place]] = {}
    peak = 0
    for kind, before, events in passes:
        now = {buffer: taken.get(buffer, take) for buffer, take in before.items()}
        taken = {buffer: take for buffer, take in now.items() if take is not None}
        # Sums of micro-batches wait for a later pass: nothing is taken behind these.
        returned = {each.number for each in events if each.kind == "give"} - before.keys()
        in_flight: dict[int, int] = {}
        """Inputs that are taken, with the bytes that are taken behind each."""
        last: dict[bool, Take] = {}
        for what, buffer, is_behind in events:
            if what == "give":
                taken.pop(buffer, None)
                in_flight.pop(buffer, None)
            if what != "take":
                continue
            if not last:
                root = roots.setdefault((kind, frozenset(taken.values())), Take())
                last = {False: root, True: root}
            is_input = buffer in inputs
            take = last[is_input] = last[is_input].next.setdefault(buffer, Take())
            left = in_flight if is_behind else ()
            others = {t for b, t in taken.items() if b != buffer and b not in left}
            conflicts.setdefault(take, set()).update(others)
            for other in others:
                conflicts.setdefault(other, set()).add(take)
            busy = [place for other in others for place in lies.get(other, other.places)[:1]]
            lies[take] = [p for p in take.places if not any(map(p.overlaps, busy))]
            if not lies[take] and len(take.places) < MOST_PLACES:
                unplaced[take] = nbytes[buffer]
            if is_behind:
                in_flight = {each: behind + nbytes[buffer] for each, behind in in_flight.items()}
            if is_input and buffer in returned:
                in_flight[buffer] = 0
            taken[buffer] = take
            # An input in flight and what is taken behind it count once.
            twice = sum(min(nbytes[each], behind) for each, behind in in_flight.items())
            peak = max(peak, sum(nbytes[each] for each in taken) - twice)
    return Demand(conflicts, unplaced, taken, peak)


def lay_out(needs: Demand, borders: Sequence[int] = ()) -> dict[Take, Place]:
    """A new place for each take of `needs.unplaced`, clear of its conflicts. `borders`: where the
    pieces of memory end of which the arena consists so far, ascending. No place lies across one;
    what lies behind the last is memory to add."""
    end = max(borders, default=0)
    goals = {max(end, aligned(int(needs.peak * each))) for each in TOLERANCES}
    if borders:
        goals.update(end + aligned(nbytes) for nbytes in needs.unplaced.values())
    # The largest first; then, as long as one does not fit below the goal, that one first.
    order = sorted(needs.unplaced, key=lambda each: -needs.unplaced[each])
    best: dict[Take, Place] = {}
    least: float = float("inf")
    for goal in (each for each in sorted(goals) for _ in range(_TRIES)):
        found: dict[Take, Place] = {}
        for each in order:
            met = needs.conflicts[each]
            busy = [place for other in met for place in other.places]
            busy += [found[other] for other in met if other in found]
            found[each] = fit(needs.unplaced[each], busy, borders, goal)
        total = max((place.stop for place in found.values()), default=0)
        if total < least:
            best, least = found, total
        if least <= goal:
            break
        late = next(each for each in order if found[each].stop > goal)
        order = [late, *(each for each in order if each is not late)]
    return best


def fit(nbytes: int, busy: Sequence[Place], borders: Sequence[int], goal: int) -> Place:
    """The smallest gap that fits: inside the arena, before the goal, or else behind all."""
    size, start = aligned(nbytes), 0
    gaps: list[tuple[int, int]] = []
    for place in sorted([*busy, *(Place(each, each) for each in (*borders, goal))]):
        room = min(place.start, goal) - start
        if room >= size:
            gaps.append((room, start))
        start = max(start, aligned(place.stop))
    if gaps:
        room, start = min(gaps)
        # At the end of the memory, unless at its beginning: in a chain, in which each conflicts
        # with the one before and the one after, neighbours then lie at opposite ends.
        if start > 0 and start + room == goal:
            start += room - size
    else:
        start = max([0, *borders, *(aligned(place.stop) for place in busy)])
    return Place(start, start + nbytes)


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
