"""The two state machines of a unit (its buffers, its place in the step), and its holds."""

from __future__ import annotations

import enum
from collections.abc import Iterable


class ShardState(enum.Enum):
    """Which parameter memory of a unit is allocated and valid."""

    successors: tuple[ShardState, ...]
    """States that may follow. An attribute of the member instead of a dict lookup, because hashing
    a member runs Python code and this is read many times a step."""
    SHARDED = "sharded"
    """Only the shard."""
    GATHERING = "gathering"
    """The shard, and a full buffer that is not valid yet."""
    UNSHARDED = "unsharded"
    """The shard, and a valid full buffer."""

    def allow(self, successors: Iterable[ShardState]) -> None:
        self.successors = tuple(successors)


class TrainingState(enum.Enum):
    """Where in the step a unit is."""

    successors: tuple[TrainingState, ...]
    IDLE = "idle"
    """None of the states below."""
    FORWARD = "forward"
    """Between pre_forward and post_forward."""
    BACKWARD = "backward"
    """Between pre_backward and the reduction of its gradients; includes recomputed forwards."""
    SUMMON_FULL_PARAMS = "summon_full_params"
    """Inside the context manager `summon_full_params`."""

    def allow(self, successors: Iterable[TrainingState]) -> None:
        self.successors = tuple(successors)


class Hold(enum.IntFlag):
    """Reasons to keep a unit unsharded, shown as `.holds` of `layerzero.units`.

    A unit with none is freed after its use.
    """

    LAST_OF_FORWARD = 1
    """The unit ran last; see Note [One unit stays] in scheduler.py."""
    FIRST_OF_FORWARD = 2
    """First of the next micro-batch; see Note [The first unit stays between micro-batches]."""
    POLICY = 4
    """`reshard_after_forward=False`: kept from its forward to its backward."""
    EXPLICIT = 8
    """The user unsharded it: kept until its next forward or the next backward has ended."""
    MICRO_BATCHES = 16
    """Kept for a pipeline; see Note [Micro-batches in flight] in scheduler.py."""
    DOUBLE_BACKWARD = 32
    """A graph of the backward (`create_graph`) reads it again."""
    OPTIONAL = 64
    """Ranks may skip it, and the backward of a forward that used it is still to come."""


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
    """Refuse a transition that is not in the tables.

    Raises:
        RuntimeError: names the unit and both states.
    """
    if new not in current.successors:
        raise RuntimeError(
            f"{unit}: {type(current).__name__} cannot go from {current.name} to {new.name}"
        )


def names_of(holds: Hold) -> str:
    """The names of the flags that are set, such as `LAST_OF_FORWARD|EXPLICIT`."""
    return "|".join(hold.name or "" for hold in Hold if hold & holds)


for _shard_state, _shard_states in SHARD_TRANSITIONS.items():
    _shard_state.allow(_shard_states)
for _training_state, _training_states in TRAINING_TRANSITIONS.items():
    _training_state.allow(_training_states)
