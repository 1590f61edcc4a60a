"""The layout of an arena: buffers that meet do not overlap, and need hardly more than they hold."""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import inf

import pytest

from layerzero.arena_layout import (
    ALIGNMENT,
    Demand,
    Event,
    Pass,
    Place,
    Prefetching,
    demand,
    last_gives,
    lay_out,
    with_prefetch,
)

MB = 1 << 20
ROOT = 1000
INPUTS = 2000
"""Added to a unit's number for the input of its reduction."""


def take(buffer: int, is_behind: bool = False) -> Event:
    return Event(True, buffer, is_behind)


def give(buffer: int) -> Event:
    return Event(False, buffer)


def chain(sizes: Sequence[int], root: int) -> tuple[list[Pass], dict[int, int], set[int]]:
    """A forward and a backward of units that run one after the other, gathered on demand."""
    numbers = range(len(sizes))
    nbytes = {unit: size for unit, size in zip(numbers, sizes, strict=True)} | {ROOT: root}
    nbytes |= {INPUTS + unit: size for unit, size in nbytes.items()}
    forward, backward = [take(ROOT), take(0)], []
    for unit in numbers[1:]:
        forward += [give(unit - 1), take(unit)]
    last = len(sizes) - 1
    for unit in reversed(numbers):  # A unit is done when the one before it is reached.
        backward += [give(unit), *([give(INPUTS + unit + 1)] if unit < last else [])]
        backward += [take(INPUTS + unit), *([take(unit - 1)] if unit else [])]
    backward += [give(ROOT), give(INPUTS), take(INPUTS + ROOT), give(INPUTS + ROOT)]
    passes = [Pass(False, {}, forward), Pass(True, {ROOT: None, last: None}, backward)]
    return passes, nbytes, {buffer for buffer in nbytes if buffer >= INPUTS}


def prefetching(nbytes: dict[int, int], forward: int, backward: int, **other: float) -> Prefetching:
    units = {buffer: size for buffer, size in nbytes.items() if buffer < INPUTS}
    limits = {"max_units": inf, "max_nbytes": inf, **other}
    return Prefetching({unit: unit for unit in units}, units, forward, backward, False, **limits)


def check(needs: Demand, nbytes: dict[int, int], found: dict[int, Place]) -> None:
    assert found.keys() == needs.unplaced
    for buffer, place in found.items():
        assert place.start % ALIGNMENT == 0 <= place.start
        assert place.stop - place.start == nbytes[buffer]
        for other in needs.conflicts[buffer]:
            assert other not in found or not place.overlaps(found[other])


KINDS = {
    "equal": lambda draw: 4 * MB,
    "several sizes": lambda draw: draw.choice([MB, 3 * MB, 8 * MB]),
    "any size": lambda draw: draw.randint(MB // 4, 16 * MB),
    "many magnitudes": lambda draw: int(2 ** draw.uniform(14, 26)),
}


BOUNDS = {0: 1.02, 1: 1.02, 2: 1.02, 3: 1.08}
"""By the number of units that forward prefetches: bytes of a layout over those taken at once. With
three ahead of any size, one of 25 chains is not laid out within 1.02."""


@pytest.mark.parametrize("kind", KINDS)
def test_recorded_orders_take_hardly_more_than_what_is_taken_at_once(kind: str) -> None:
    for seed in range(12):
        draw = random.Random(seed)
        sizes = [KINDS[kind](draw) for _ in range(draw.randint(2, 40))]
        passes, nbytes, inputs = chain(sizes, root=draw.choice([ALIGNMENT, 50 * MB]))
        for depth, bound in BOUNDS.items():
            policy = prefetching(nbytes, depth, min(depth, 1))
            needs = demand([with_prefetch(each, policy) for each in passes], nbytes, {}, inputs)
            found = lay_out(needs, nbytes)
            check(needs, nbytes, found)
            assert max(place.stop for place in found.values()) <= bound * needs.peak


def test_random_takes_and_gives_never_overlap() -> None:
    for seed in range(15):
        draw = random.Random(seed)
        nbytes = {buffer: draw.randint(1, 10_000) for buffer in range(20)}
        places: dict[int, list[Place]] = {}
        borders: list[int] = []
        for _ in range(3):  # Orders that come one after the other.
            taken: set[int] = set()
            events = []
            for _ in range(80):
                buffer = draw.randrange(20)
                events.append(Event(buffer not in taken, buffer))
                taken ^= {buffer}
            needs = demand([Pass(False, {}, events)], nbytes, places)
            found = lay_out(needs, nbytes, borders)
            check(needs, nbytes, found)
            for buffer, place in found.items():
                met = (p for each in needs.conflicts[buffer] for p in needs.used.get(each, ()))
                assert not any(map(place.overlaps, met))
                assert not any(place.start < border < place.stop for border in borders)
            for buffer, place in found.items():
                places.setdefault(buffer, []).append(place)
            if found:
                end = -(-max(place.stop for place in found.values()) // ALIGNMENT) * ALIGNMENT
                borders += [end] if end > max(borders, default=0) else []
            assert not demand([Pass(False, {}, events)], nbytes, places).unplaced


def test_a_place_that_is_free_is_taken_again_and_a_new_order_keeps_it() -> None:
    nbytes = {0: 100, 1: 100, 2: 100}
    first = Pass(False, {}, [take(0), give(0), take(1), give(1)])
    places = {b: [p] for b, p in lay_out(demand([first], nbytes, {}), nbytes).items()}
    assert places == {0: [Place(0, 100)], 1: [Place(0, 100)]}
    both = Pass(False, {}, [take(0), take(1), take(2)])
    needs = demand([both], nbytes, places)
    assert needs.unplaced == {1, 2} and needs.peak == 300
    found = lay_out(needs, nbytes, [ALIGNMENT])
    check(needs, nbytes, found)
    assert all(place.start >= ALIGNMENT for place in found.values())


def test_prefetching_starts_gathers_earlier() -> None:
    passes, nbytes, _ = chain([1, 1, 1, 1], root=1)
    forward, backward = (with_prefetch(each, prefetching(nbytes, 1, 1)).events for each in passes)
    assert list(forward) == [
        *(take(ROOT), take(0), take(1)),
        *(give(0), take(2), give(1), take(3), give(2)),
    ]
    assert list(backward)[:3] == [take(2, True), give(3), take(INPUTS + 3)]
    assert list(backward)[3:7] == [take(1, True), give(2), give(INPUTS + 3), take(INPUTS + 2)]


@pytest.mark.parametrize("limit", [{"max_units": 3}, {"max_nbytes": 3 * MB}])
def test_prefetching_heeds_the_limit(limit: dict[str, float]) -> None:
    passes, nbytes, _ = chain([MB] * 6, root=MB)
    pass_ = with_prefetch(passes[0], prefetching(nbytes, 4, 1, **limit))
    assert demand([pass_], nbytes, {}).peak == 3 * MB
    unlimited = with_prefetch(passes[0], prefetching(nbytes, 4, 1))
    assert demand([unlimited], nbytes, {}).peak == 6 * MB


def test_what_is_taken_behind_reductions_shares_their_inputs_place() -> None:
    nbytes = {0: MB, 1: MB, INPUTS: MB}
    events = [take(INPUTS), take(0), take(1, is_behind=True), give(0), give(INPUTS)]
    needs = demand([Pass(True, {}, events)], nbytes, {}, {INPUTS})
    assert needs.conflicts[1] == {0} and needs.peak == 2 * MB
    # A sum that waits since an earlier pass waits on.
    needs = demand([Pass(True, {INPUTS: None}, events[1:])], nbytes, {}, {INPUTS})
    assert needs.conflicts[1] == {0, INPUTS} and needs.peak == 3 * MB


def test_the_last_of_several_gives_counts() -> None:
    events = [take(0), give(0), take(1), give(0), give(1), take(0), give(0)]
    assert last_gives(events) == [take(0), take(1), give(0), give(1), take(0), give(0)]
