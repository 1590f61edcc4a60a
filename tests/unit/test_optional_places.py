"""What forwards teach about the places where regions are entered."""

import pytest

from layerzero.optional.places import Places

_A, _B, _C = 1, 2, 3
"""Gathers of required units."""
_V, _W = 10, 11
"""Regions."""


def _run(places: Places, *steps: int, kind: str = "kind") -> list[bool]:
    """One forward; returns at which places ranks exchange, the last one included."""
    places.begin(kind)
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


@pytest.mark.parametrize(
    ("earlier", "forward", "expected"),
    [
        pytest.param([(_A, _B)], (_A, _V, _B), [1, 1, 1], id="no region has come before"),
        pytest.param([(_A, _B), (_A, _V, _B)], (_A, _B), [0, 1, 0], id="there it came"),
        pytest.param(
            [(_A, _V, _B), (_A, _B, _W)], (_A, _B), [0, 1, 1], id="regions of different forwards"
        ),
        pytest.param([(_A, _V, _B, _V)], (_A, _B), [1, 1, 1], id="one at two places: anywhere"),
        pytest.param([(_V, _A, _B)], (_A, _C), [1, 1, 1], id="leaves every known path"),
        # On the way that both share a region may come as on the new one.
        pytest.param([(_V, _A, _B), (_A, _C)], (_A, _B), [1, 1, 0], id="a path that is new"),
        pytest.param([(_V, _A, _B), (_V, _A, _C)], (_A, _B), [1, 0, 0], id="two known paths"),
        pytest.param([(_V, _A, _B)], (_A,), [1, 1], id="another end"),
    ],
)
def test_ranks_exchange_where_regions_may_come(
    earlier: list[tuple[int, ...]], forward: tuple[int, ...], expected: list[int]
) -> None:
    places = Places(frozenset({_V, *(step for each in earlier for step in each if step >= _V)}))
    for each in earlier:
        _run(places, *each)
    assert _run(places, *forward) == expected


def test_what_teaches_nothing() -> None:
    places = Places(frozenset([_V]), is_known_ever=False)
    _run(places, _A, _V)
    assert _run(places, _A) == [True, True], "regions used at several places are never known"
    places = Places(frozenset([_V]))
    _run(places, _V, _A)
    places.abort()
    assert _run(places, _A) == [True, True], "a forward that is taken back"
    _run(places, _V, _A)
    assert _run(places, _A, kind="another") == [True, True]
