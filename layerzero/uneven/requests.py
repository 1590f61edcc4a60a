"""Request: what a rank wants to do next; ranks exchange these before each call inside a join."""

from __future__ import annotations

import enum
from typing import NamedTuple


class Kind(enum.IntEnum):
    """Kinds of requests; the lowest is chosen first."""

    BACKWARD = 0
    MICRO_FORWARD = 1
    EVALUATION = 2
    FORWARD = 3
    CLIP = 4
    REDUCE = 5
    STEP = 6
    CALL = 7
    """Another collective call: ranks without batches cannot take part in it."""
    OUT = 8
    """The rank is out of batches."""
    LAST = 9
    """All ranks are, and this one was not before others."""


FORWARDS = (Kind.MICRO_FORWARD, Kind.EVALUATION, Kind.FORWARD)
FOLLOWED = (Kind.BACKWARD, *FORWARDS, Kind.REDUCE)
"""What ranks without a batch for it follow collective by collective."""


class Request(NamedTuple):
    """What a rank wants to do next. Ranks with equal requests do it together."""

    kind: int
    which: int = 0
    """Of the unit called or clipped, of the forward that backward runs through, of the optimizer in
    the join's list."""
    mode: int = True
    """Of a forward: whether its module is in training mode. Of a backward: 1 if gradients are
    reduced, and 2 more if it makes a graph of itself."""
    max_norm: float = 0.0
    """Arguments of `clip_grad_norm_`."""
    norm_type: float = 0.0


OUT = Request(Kind.OUT)
LAST = Request(Kind.LAST)
