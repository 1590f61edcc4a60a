"""The two state machines of a unit: what is resident, and where in the step it is."""

from __future__ import annotations

import enum


class ShardState(enum.Enum):
    """What is resident of a unit."""

    successors: tuple[ShardState, ...]
    SHARDED = "sharded"
    """The shard alone."""
    GATHERING = "gathering"
    """The shard and the full buffer, whose contents are not valid yet."""
    UNSHARDED = "unsharded"
    """The shard and the full buffer."""


class TrainingState(enum.Enum):
    """Where in the step a unit is."""

    successors: tuple[TrainingState, ...]
    IDLE = "idle"
    """Between steps, and between units."""
    FORWARD = "forward"
    """From pre_forward to post_forward."""
    BACKWARD = "backward"
    """From pre_backward until its gradients left; recomputed forwards stay here."""
    SUMMON_FULL_PARAMS = "summon_full_params"
    """Inside the context manager."""


SHARD_TRANSITIONS: dict[ShardState, frozenset[ShardState]] = {
    ShardState.SHARDED: frozenset({ShardState.GATHERING}),
    ShardState.GATHERING: frozenset({ShardState.UNSHARDED}),
    ShardState.UNSHARDED: frozenset({ShardState.SHARDED}),
}

TRAINING_TRANSITIONS: dict[TrainingState, frozenset[TrainingState]] = {
    TrainingState.IDLE: frozenset(
        {TrainingState.FORWARD, TrainingState.BACKWARD, TrainingState.SUMMON_FULL_PARAMS}
    ),
    TrainingState.FORWARD: frozenset({TrainingState.IDLE}),
    TrainingState.BACKWARD: frozenset({TrainingState.IDLE}),
    TrainingState.SUMMON_FULL_PARAMS: frozenset({TrainingState.IDLE}),
}


def check_transition(
    unit: str, current: ShardState | TrainingState, new: ShardState | TrainingState
) -> None:
    """Refuse a pair that is not in the tables.

    Raises:
        RuntimeError: names the unit and both states.
    """
    if new not in current.successors:
        raise RuntimeError(
            f"{unit}: {type(current).__name__} cannot go from {current.name} to {new.name}"
        )


# On the members, because hashing one runs Python code, and this is looked up many times a step.
for _shard_state, _shard_states in SHARD_TRANSITIONS.items():
    _shard_state.successors = tuple(_shard_states)
for _training_state, _training_states in TRAINING_TRANSITIONS.items():
    _training_state.successors = tuple(_training_states)
