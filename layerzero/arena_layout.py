"""Where buffers lie in an arena, computed from what passes took and gave back. Integers only.

A buffer has one or more places in the arena and takes the first that is free. So it lies at the
same address whenever the same buffers are taken at that moment: in every step of one order.

The first pass of an order gathers each unit when it is needed, later ones prefetch. So what the
first pass shows is laid out as the later ones will be (`with_prefetch`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import NamedTuple

ALIGNMENT = 512
"""Bytes; what torch's allocators for devices align to. A cache line on the CPU has 64."""
TOLERANCES = (1.0, 1.0025, 1.005, 1.01, 1.02)
"""Bytes of a layout over the most that are taken at once, that are tried one after the other."""
_TRIES = 32


class Event(NamedTuple):
    """A buffer is taken or given back, in the order of the host."""

    takes: bool
    buffer: int
    is_behind: bool = False
    """Whether it is taken only when the reductions in flight have given back their inputs."""


class Place(NamedTuple):
    start: int
    stop: int

    def overlaps(self, other: Place) -> bool:
        return self.start < other.stop and other.start < self.stop


class Pass(NamedTuple):
    """One forward or one backward."""

    is_backward: bool
    taken: Mapping[int, Place | None]
    """Buffers that are taken when it begins; None: outside the arena."""
    events: Sequence[Event]


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


class Visits(NamedTuple):
    """The gathers of one pass, in order; the buffers of a unit belong to one visit."""

    units: list[int]
    buffers: list[list[int]]

    @classmethod
    def of(cls, events: Iterable[Event], unit_of: Mapping[int, int]) -> Visits:
        visits = cls([], [])
        for event in events:
            if event.takes and event.buffer in unit_of:
                unit = unit_of[event.buffer]
                if visits.units[-1:] == [unit] and event.buffer not in visits.buffers[-1]:
                    visits.buffers[-1].append(event.buffer)
                else:
                    visits.units.append(unit)
                    visits.buffers.append([event.buffer])
        return visits


def last_gives(events: Sequence[Event]) -> list[Event]:
    """The events without all but the last of several gives of one take: a reduction's thread gives
    its input back at any time, and the host does so again when it has waited for the thread."""
    kept, given = [], set()
    for event in reversed(events):
        if event.takes:
            given.discard(event.buffer)
        elif event.buffer in given:
            continue
        else:
            given.add(event.buffer)
        kept.append(event)
    return kept[::-1]


def with_prefetch(first: Pass, policy: Prefetching) -> Pass:
    """The pass as it will be once its order was recorded: its gathers start earlier."""
    unit_of, in_backward = policy.unit_of, first.is_backward
    depth = policy.backward_depth if in_backward else policy.forward_depth
    visits = Visits.of(first.events, unit_of)
    events: list[Event] = []
    resident = {unit_of[buffer] for buffer in first.taken if buffer in unit_of}
    started: set[int] = set()
    visit = -1

    def start(number: int, is_behind: bool) -> None:
        started.add(number)
        resident.add(visits.units[number])
        events.extend(Event(True, buffer, is_behind) for buffer in visits.buffers[number])

    def prefetch() -> None:
        for number in range(visit + 1, min(visit + 1 + depth, len(visits.units))):
            unit = visits.units[number]
            if number in started or unit in resident:
                continue
            nbytes = sum(policy.nbytes[each] for each in (*resident, unit))
            if len(resident) >= policy.max_units or nbytes > policy.max_nbytes:
                return
            start(number, in_backward and not policy.when_done)

    if in_backward and not policy.when_done:
        prefetch()  # Units that are still full are reached first, and prefetch as well.
    left = 0
    """Gathers of the current visit still to come in the record."""
    for event in first.events:
        if event.buffer not in unit_of:
            events.append(event)
        elif event.takes:
            if not left:
                visit += 1
                left = len(visits.buffers[visit])
                if visit not in started:
                    start(visit, event.is_behind)
                if not (in_backward and policy.when_done):
                    prefetch()
            left -= 1
        else:
            events.append(event)
            resident.discard(unit_of[event.buffer])
            if in_backward and policy.when_done:
                prefetch()
    return first._replace(events=events)


class Demand(NamedTuple):
    """Needs of passes, of an arena that they use."""

    conflicts: dict[int, set[int]]
    """Buffers that are taken while another one is."""
    unplaced: set[int]
    """Buffers that none of their places serve."""
    used: dict[int, set[Place]]
    """Places that buffers lie in."""
    peak: int
    """The most bytes that are taken at once."""


def demand(
    passes: Iterable[Pass],
    nbytes: Mapping[int, int],
    places: Mapping[int, Sequence[Place]],
    inputs: Set[int] = frozenset(),
) -> Demand:
    """Follow passes through the arena.

    Args:
        nbytes: of every buffer.
        places: of those that have any, in the order in which they are tried.
        inputs: buffers that are inputs of reductions.
    """
    conflicts: dict[int, set[int]] = {}
    unplaced: set[int] = set()
    used: dict[int, set[Place]] = {}
    peak = 0
    for each in passes:
        # What lies outside only because it had no place yet will lie in its place.
        taken = {b: p or next(iter(places.get(b, ())), None) for b, p in each.taken.items()}
        in_flight: set[int] = set()
        for buffer, place in taken.items():
            used.setdefault(buffer, set()).update([] if place is None else [place])
        returned = _returned_inputs(each, inputs)
        for event in each.events:
            buffer = event.buffer
            if not event.takes:
                taken.pop(buffer, None)
                in_flight.discard(buffer)
                continue
            others = taken.keys() - {buffer} - (in_flight if event.is_behind else set())
            own = conflicts.setdefault(buffer, set())
            own |= others
            for other in others:
                conflicts.setdefault(other, set()).add(buffer)
            busy = [place for other in others if (place := taken[other]) is not None]
            free = (p for p in places.get(buffer, ()) if not any(map(p.overlaps, busy)))
            taken[buffer] = place = next(free, None)
            if place is None:
                unplaced.add(buffer)
            else:
                used.setdefault(buffer, set()).add(place)
            if buffer in returned:
                in_flight.add(buffer)
            peak = max(peak, nbytes[buffer] + _at_once(others, in_flight, conflicts, nbytes))
    return Demand(conflicts, unplaced, used, peak)


def _returned_inputs(each: Pass, inputs: Set[int]) -> set[int]:
    """Inputs that a take behind reductions waits for, while they are taken: those of reductions in
    this pass. Sums of micro-batches stay, and are in `taken` of a later pass."""
    last = {event.buffer: event.takes for event in each.events}
    return {b for b in inputs if not last.get(b, True) and b not in each.taken}


def _at_once(
    others: set[int],
    in_flight: set[int],
    conflicts: Mapping[int, set[int]],
    nbytes: Mapping[int, int],
) -> int:
    """Bytes of `others`, of which an input in flight and what is taken behind it count once."""
    total = sum(nbytes[each] for each in others)
    for each in others & in_flight:
        behind = sum(nbytes[o] for o in others - {each} if o not in conflicts.get(each, ()))
        total -= min(nbytes[each], behind)
    return total


def lay_out(
    needs: Demand, nbytes: Mapping[int, int], borders: Sequence[int] = ()
) -> dict[int, Place]:
    """A new place for each buffer of `needs.unplaced`, clear of its conflicts.

    Args:
        borders: where the pieces of memory end of which the arena consists so far, ascending. No
            place lies across one; what lies behind the last is memory to add.
    """
    sizes = {each: aligned(nbytes[each]) for each in needs.unplaced}
    # The largest first; then, as long as one does not fit below the goal, that one first.
    order = sorted(sizes, key=lambda each: (-sizes[each], each))
    best: dict[int, Place] = {}
    least: float = float("inf")
    for goal in (aligned(int(needs.peak * each)) for each in TOLERANCES for _ in range(_TRIES)):
        goal = max([goal, *borders[-1:]])
        found: dict[int, Place] = {}
        late: int | None = None
        for each in order:
            met = needs.conflicts.get(each, set())
            busy = [place for other in met for place in needs.used.get(other, ())]
            busy += [found[other] for other in met if other in found]
            place = _fit(sizes[each], sorted(busy), [0, *borders], goal)
            if late is None and place.stop > goal:
                late = each
            found[each] = place
        total = max((place.stop for place in found.values()), default=0)
        if total < least:
            best, least = found, total
        if late is None:
            break
        order.remove(late)
        order.insert(0, late)
    return {each: Place(place.start, place.start + nbytes[each]) for each, place in best.items()}


def _fit(size: int, busy: Sequence[Place], borders: Sequence[int], goal: int) -> Place:
    """The smallest gap that fits: inside the arena, before the goal, or else behind all."""
    pieces = zip(borders, [*borders[1:], goal], strict=True)
    gaps = [gap for start, stop in pieces for gap in _gaps(busy, start, stop)]
    fitting = [gap for gap in gaps if gap.stop - gap.start >= size]
    if not fitting:
        start = max([borders[-1], *(aligned(place.stop) for place in busy)])
        return Place(start, start + size)
    gap = min(fitting, key=lambda each: (each.stop - each.start, each.start))
    # At the end of the memory, unless at its beginning: in a chain, in which each conflicts with
    # the one before and the one after, neighbours then lie at opposite ends.
    start = gap.stop - size if gap.start > 0 and gap.stop == goal else gap.start
    return Place(start, start + size)


def _gaps(busy: Sequence[Place], start: int, stop: int) -> Iterable[Place]:
    for place in busy:
        if place.start > start:
            yield Place(start, min(place.start, stop))
        start = max(start, aligned(place.stop))
        if start >= stop:
            return
    if start < stop:
        yield Place(start, stop)


def aligned(nbytes: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
