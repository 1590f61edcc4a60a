"""Request: what a rank wants to do next. Pure Python."""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple


class Kind(enum.IntEnum):
    """Kinds of requests, each with its text in messages; the lowest is chosen first."""

    text: str

    def __new__(cls, value: int, text: str = "") -> Kind:
        kind = int.__new__(cls, value)
        kind._value_, kind.text = value, text
        return kind

    BACKWARD = 0, "backward"
    MICRO_FORWARD = 1, "a forward inside no_sync"
    EVALUATION = 2, "a forward without gradients"
    FORWARD = 3, "a forward"
    CLIP = 4, "clip_grad_norm_"
    REDUCE = 5, "reduce_gradients"
    STEP = 6, "optimizer.step"
    CALL = 7, "another collective call"
    """Ranks without batches cannot take part in it."""
    OUT = 8, "out of batches"


FORWARDS = (Kind.MICRO_FORWARD, Kind.EVALUATION, Kind.FORWARD)
FOLLOWED = (Kind.BACKWARD, *FORWARDS, Kind.REDUCE)
"""What ranks without a batch for it follow collective by collective."""


class Request(NamedTuple):
    """What a rank wants to do next. Ranks with equal requests do it together."""

    kind: int
    which: int = 0
    """Of the unit called or clipped, of the forward that backward runs through, of the optimizer in
    the join's list."""
    is_training: int = False
    """Of a forward: whether its module is in training mode."""
    requires_sync: int = True
    """Of a backward: whether gradients are reduced."""
    max_norm: int = 0
    """`bits_of` that of `clip_grad_norm_`."""
    norm_type: int = 0
    """The same."""

    def __str__(self) -> str:
        return Kind(self.kind).text


WIDTH = len(Request(0))
OUT = Request(Kind.OUT)


def bits_of(number: float) -> int:
    """A float as 64 bits."""
    bits: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return bits


def number_of(bits: int) -> float:
    """The float of `bits_of`."""
    number: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return number
