"""What passes teach about the places where optional units come."""

from layerzero.optional.places import Places

_A, _B = 2, 4
"""Gathers of required units 1 and 2."""
_V, _W = 20, 22
"""Gathers of optional units 10 and 11."""


def _run(
    places: Places, *steps: int, needed: tuple[int, ...] = (10,), roam: bool = True
) -> list[bool]:
    """One pass; returns whether each place was known when the pass came to its end."""
    places.begin("kind", needed, roam)
    known = []
    for step in steps:
        if step >= _V:
            places.happened(step)
        else:
            known.append(places.is_known)
            places.required(step)
    known.append(places.is_known)
    places.end()
    return known


def test_places_are_known_once_every_optional_unit_has_come() -> None:
    places = Places()
    assert _run(places, _A, _B) == [False, False, False]
    assert _run(places, _A, _V, _B) == [False, False, False], "unit 10 has not come before"
    assert _run(places, _A, _B) == [True, True, True]


def test_what_is_expected_at_a_place_is_what_came_there() -> None:
    places = Places()
    _run(places, _A, _V, _W, _B)
    places.begin("kind", (10, 11), roam=True)
    assert places.expected == []
    places.required(_A)
    assert places.expected == [_V, _W]
    places.required(_B)
    assert places.expected == []


def test_events_that_did_not_come_again_stay_expected_behind_new_ones() -> None:
    places = Places()
    _run(places, _A, _V)
    _run(places, _A, _W)
    places.begin("kind", (10, 11), roam=True)
    places.required(_A)
    assert places.expected == [_W, _V]


def test_what_came_twice_is_expected_twice() -> None:
    places = Places()
    _run(places, _A, _V, _W, _V)
    _run(places, _A, _V)
    places.begin("kind", (10, 11), roam=True)
    places.required(_A)
    assert places.expected == [_V, _W, _V]


def test_a_path_that_was_never_recorded_is_not_known() -> None:
    places = Places()
    _run(places, _A, _V, _B)
    places.begin("kind", (10,), roam=True)
    assert places.goes_on_with(_A) and not places.goes_on_with(_B)
    places.required(_A)
    assert not places.goes_on_with(None), "no pass ended here"
    places.required(_A)
    assert not places.is_known


def test_two_paths_share_their_places_until_they_part() -> None:
    places = Places()
    _run(places, _A, _V, _B)
    _run(places, _A, _V, _A)
    places.begin("kind", (10,), roam=True)
    places.required(_A)
    assert places.is_known and places.expected == [_V]
    assert places.goes_on_with(_A) and places.goes_on_with(_B)


def test_a_unit_that_came_at_two_places_may_come_anywhere() -> None:
    places = Places()
    _run(places, _A, _V, _B, _V)
    assert _run(places, _A, _B) == [False] * 3
    assert _run(places, _A, _B, roam=False) == [True] * 3, "a backward repeats its forward"


def test_what_comes_next_is_known_as_far_as_all_paths_agree() -> None:
    places = Places()
    _run(places, _A, _V, _B, _A)
    _run(places, _A, _V, _B, _B)
    places.begin("kind", (10,), roam=True)
    assert list(places.ahead()) == [(_A, [_V]), (_B, [])]
    places.required(_A)
    places.happened(_V)
    assert list(places.ahead()) == [(_B, [])]
    assert places.came == {_A, _V}
    places.required(_A)
    assert not places.is_recorded and list(places.ahead()) == []


def test_without_optional_units_everything_is_known() -> None:
    assert _run(Places(), _A, needed=()) == [True, True]


def test_an_abandoned_pass_teaches_nothing() -> None:
    places = Places()
    places.begin("kind", (10,), roam=True)
    places.happened(_V)
    places.abort()
    assert _run(places, _A) == [False, False]


def test_old_kinds_are_forgotten() -> None:
    places = Places(max_kinds=1)
    _run(places, _V)
    places.begin("other", (10,), roam=True)
    places.end()
    assert _run(places) == [False]
