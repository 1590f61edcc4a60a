"""What forwards teach about the places where regions are entered."""

from layerzero.optional.places import Places

_A, _B, _C = 1, 2, 3
"""Gathers of required units."""
_V, _W = 10, 11
"""Regions."""


def _run(places: Places, *steps: int) -> list[bool]:
    """One forward; returns at which places ranks exchange, the last one included."""
    places.begin("kind")
    exchanges = []
    for step in steps:
        if step >= _V:
            places.happened(step)
        else:
            exchanges.append(places.exchanges or places.leaves_with(step))
            places.required(step)
    exchanges.append(places.exchanges or places.leaves_with(None))
    places.end()
    return exchanges


def test_ranks_exchange_everywhere_until_every_region_has_come() -> None:
    places = Places(frozenset([_V]))
    assert _run(places, _A, _B) == [True, True, True]
    assert _run(places, _A, _V, _B) == [True, True, True], "region 10 has not come before"
    assert _run(places, _A, _B) == [False, True, False], "there it came"


def test_regions_may_come_in_different_forwards() -> None:
    places = Places(frozenset([_V, _W]))
    _run(places, _A, _V, _B)
    assert _run(places, _A, _B, _W) == [True, True, True]
    assert _run(places, _A, _B) == [False, True, True]


def test_a_region_at_two_places_may_come_anywhere() -> None:
    places = Places(frozenset([_V]))
    _run(places, _A, _V, _B, _V)
    assert _run(places, _A, _B) == [True, True, True]


def test_regions_used_at_several_places_are_never_known() -> None:
    places = Places(frozenset([_V]), is_known_ever=False)
    _run(places, _A, _V)
    assert _run(places, _A) == [True, True]


def test_ranks_exchange_where_they_leave_every_known_path() -> None:
    places = Places(frozenset([_V]))
    _run(places, _V, _A, _B)
    assert _run(places, _A, _C) == [True, True, True]
    # On the way that both share a region may come as on the new one.
    assert _run(places, _A, _B) == [True, True, False]
    _run(places, _V, _A, _C)
    assert _run(places, _A, _B) == [True, False, False]
    assert _run(places, _A) == [True, True], "another end"


def test_kinds_are_apart() -> None:
    places = Places(frozenset([_V]))
    _run(places, _V, _A)
    places.begin("another")
    assert places.exchanges


def test_a_forward_that_is_taken_back_teaches_nothing() -> None:
    places = Places(frozenset([_V]))
    _run(places, _A, _V)
    places.abort()
    assert _run(places, _A) == [True, True]
