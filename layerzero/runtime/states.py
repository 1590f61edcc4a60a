"""The two state machines of a unit (what is resident, where in the step it is), and its holds."""

from __future__ import annotations

import enum
from collections.abc import Iterable


class ShardState(enum.Enum):
    """What is resident of a unit."""

    successors: tuple[ShardState, ...]
    """What it may become next. On the member, because hashing one runs Python code, and this is
    looked up many times a step."""
    SHARDED = "sharded"
    """The shard alone."""
    GATHERING = "gathering"
    """The shard and the full buffer, whose contents are not valid yet."""
    UNSHARDED = "unsharded"
    """The shard and the full buffer."""

    def allow(self, successors: Iterable[ShardState]) -> None:
        self.successors = tuple(successors)


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

    def allow(self, successors: Iterable[TrainingState]) -> None:
        self.successors = tuple(successors)


class Hold(enum.IntFlag):
    """Why a unit stays full: `.holds` of `layerzero.units`. With no reason left it is freed."""

    LAST_OF_FORWARD = 1
    """It was the last to run; see Note [One unit stays] in unshard_scheduler.py."""
    FIRST_OF_FORWARD = 2
    """It begins the next micro-batch; see Note [The first unit stays between micro-batches]."""
    POLICY = 4
    """`reshard_after_forward=False`: from its forward to its backward."""
    EXPLICIT = 8
    """It was unsharded by hand: until its next forward or the next backward has ended."""
    MICRO_BATCHES = 16
    """See Note [Micro-batches in flight] in unshard_scheduler.py."""
    DOUBLE_BACKWARD = 32
    """A graph of the backward (`create_graph`) uses it again."""


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


def names_of(holds: Hold) -> str:
    """The reasons by name, as `LAST_OF_FORWARD|EXPLICIT`."""
    return "|".join(hold.name or "" for hold in Hold if hold & holds)


for _shard_state, _shard_states in SHARD_TRANSITIONS.items():
    _shard_state.allow(_shard_states)
for _training_state, _training_states in TRAINING_TRANSITIONS.items():
    _training_state.allow(_training_states)
