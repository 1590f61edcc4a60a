"""Every pair of states is allowed or refused as their successors say."""

from __future__ import annotations

import itertools

import pytest

from layerzero.step.unit import ShardState, TrainingState, check_transition


@pytest.mark.parametrize(
    ("current", "new"),
    [
        pytest.param(a, b, id=f"{a.name} to {b.name}")
        for states in (ShardState, TrainingState)
        for a, b in itertools.product(states, repeat=2)
    ],
)
def test_a_transition_is_checked(current, new) -> None:
    if new in current.successors:
        check_transition("layers.3", current, new)
        return
    with pytest.raises(RuntimeError, match=r"layers\.3") as caught:
        check_transition("layers.3", current, new)
    assert current.name in str(caught.value)
    assert new.name in str(caught.value)


@pytest.mark.parametrize("states", [ShardState, TrainingState])
def test_every_state_can_be_left_and_reached(states) -> None:
    assert all(state.successors for state in states)
    assert set().union(*(state.successors for state in states)) == set(states)
