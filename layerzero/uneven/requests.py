"""Request: what a rank wants to do next; `choose`: the one that all ranks follow. Pure Python."""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from typing import NamedTuple


class Kind(enum.IntEnum):
    """Kinds of requests; the lowest is chosen first."""

    RAISED = 0
    """The rank leaves the loop with an error."""
    BACKWARD = 1
    MICRO_FORWARD = 2
    """A forward inside `no_sync`."""
    EVALUATION = 3
    """A forward without gradients."""
    FORWARD = 4
    CLIP = 5
    REDUCE = 6
    STEP = 7
    UNSCALE = 8
    SCALED_STEP = 9
    UPDATE = 10
    """Of a gradient scaler."""
    CALL = 11
    """Another collective call, which ranks without batches cannot take part in."""
    OUT = 12
    """The rank is out of batches."""


SCALING = (Kind.UNSCALE, Kind.SCALED_STEP, Kind.UPDATE)
FORWARDS = (Kind.MICRO_FORWARD, Kind.EVALUATION, Kind.FORWARD)
FOLLOWED = (Kind.BACKWARD, *FORWARDS, Kind.REDUCE)
"""What ranks without a batch for it follow collective by collective."""
_TEXTS = {
    Kind.BACKWARD: "backward",
    Kind.MICRO_FORWARD: "a forward inside no_sync",
    Kind.EVALUATION: "a forward without gradients",
    Kind.FORWARD: "a forward",
    Kind.CLIP: "clip_grad_norm_",
    Kind.REDUCE: "reduce_gradients",
    Kind.STEP: "optimizer.step",
    Kind.UNSCALE: "scaler.unscale_",
    Kind.SCALED_STEP: "scaler.step",
    Kind.UPDATE: "scaler.update",
    Kind.CALL: "another collective call",
}


class Request(NamedTuple):
    """What a rank wants to do next. Ranks with equal requests do it together."""

    kind: int
    which: int = 0
    """Of the unit called or clipped, of the forward that backward runs through, of the optimizer in
    the join's list; of a scaler and its optimizer, see `JoinedScalers`."""
    is_training: int = False
    """Of a forward: whether its module is in training mode."""
    requires_sync: int = True
    """Of a backward: whether gradients are reduced."""
    first: int = 0
    """`bits_of(max_norm)`; or whether a scaler has a new scale."""
    second: int = 0
    """`bits_of(norm_type)`; or that of the new scale."""

    def __str__(self) -> str:
        return _TEXTS.get(Kind(self.kind), "nothing")


WIDTH = len(Request(0))
RAISED = Request(Kind.RAISED)
OUT = Request(Kind.OUT)


class Different(Exception):
    """Ranks came to different calls."""


def choose(requests: Sequence[Request]) -> Request | None:
    """The request that all ranks follow; None: all ranks are out of batches.

    Raises:
        Different: what every rank with batches left must do together is not what all of them want.
    """
    running = [request for request in requests if request.kind != Kind.OUT]
    if not running:
        return None
    first = min(running)
    if first.kind >= Kind.FORWARD and any(request != first for request in running):
        raise Different
    return first


def bits_of(number: float) -> int:
    """A float as 64 bits."""
    bits: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return bits


def number_of(bits: int) -> float:
    """The float of `bits_of`."""
    number: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return number
