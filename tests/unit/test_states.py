"""Every pair of states is allowed or refused as the tables say."""

from __future__ import annotations

import itertools

import pytest

from layerzero.step.unit import (
    SHARD_TRANSITIONS,
    TRAINING_TRANSITIONS,
    ShardState,
    TrainingState,
    check_transition,
)


def pairs(states, table) -> list:
    return [
        pytest.param(a, b, b in table[a], id=f"{a.name} to {b.name}")
        for a, b in itertools.product(states, repeat=2)
    ]


@pytest.mark.parametrize(
    ("current", "new", "allowed"),
    pairs(ShardState, SHARD_TRANSITIONS) + pairs(TrainingState, TRAINING_TRANSITIONS),
)
def test_a_transition_is_checked(current, new, allowed: bool) -> None:
    if allowed:
        check_transition("layers.3", current, new)
        return
    with pytest.raises(RuntimeError, match=r"layers\.3") as caught:
        check_transition("layers.3", current, new)
    assert current.name in str(caught.value)
    assert new.name in str(caught.value)


def test_every_state_can_be_left_and_reached() -> None:
    for states, table in ((ShardState, SHARD_TRANSITIONS), (TrainingState, TRAINING_TRANSITIONS)):
        assert set(table) == set(states)
        assert set().union(*table.values()) == set(states)
