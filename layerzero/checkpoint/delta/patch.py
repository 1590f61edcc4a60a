"""Patch: some elements of one tensor, and its place in the chain of its sender.

Note [A chain of patches]
    Every rank numbers the patches that it yields, 1, 2, 3, ..., and never uses a number twice. A
    patch also says after which number it comes: that of the last patch that counted as sent.

        number  1   2   3   4            5   6
        after   0   1   2   3   3 is     3   5       the round was interrupted at patch 4, which
                                sent                 may have arrived or not; 5 begins the repeat

    A receiver at position p takes a patch with after <= p < number, and moves to number. Otherwise
    a patch was lost (p < after), or comes again (p >= number). The patches of `full()` have parts
    instead, and the last one moves the receiver to the position of the sender.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from layerzero.state_dict.errors import CheckpointError


class DeltaError(CheckpointError, ValueError):
    """A patch does not fit the tensors, the dtype or the chain. The message names it and why."""


class Link(NamedTuple):
    """A patch's place in the chain of its sender; see Note [A chain of patches]."""

    stream: str
    """Name of the stream, the same on all ranks."""
    chain: str
    """Random name of the sender's `DeltaStream` object: another object begins another chain."""
    sender: int
    """Global rank of the sender."""
    anchor: tuple[str, ...]
    """Names of the tensor beside which receivers keep the sender's chain."""
    number: int
    """Of a patch of `full()`: that of the sender's last patch before it."""
    after: int
    part: int = 0
    """Number of this patch among those of one `full()`, from 0."""
    parts: int = 0
    """How many patches that `full()` has; 0: the patch is one of `changes()`."""

    @property
    def where(self) -> str:
        what = f"part {self.part + 1} of {self.parts} of full()" if self.parts else "patch"
        number = "" if self.parts else f" {self.number}"
        return f"{what}{number} of rank {self.sender}, stream {self.stream}"


@dataclass(frozen=True)
class Patch:
    """New values of some elements of one tensor. Can be pickled.

    Attributes:
        name: the tensor's name in the model's state dict, of a tied parameter the first one.
        indices: [n] int64, rising: positions in the flattened original tensor.
        values: [n] in the stream's dtype; in the tensor's own if that is not floating-point.
        shape: shape of the original tensor.
        aliases: the other names of a tied parameter.
        link: place in the chain of its sender.
        before: CRC-32 of the bytes that receivers have at `indices`, in the dtype of `values`;
            None: not computed. It is for a receiver that starts without `full()`.
    """

    name: str
    indices: torch.Tensor
    values: torch.Tensor
    shape: tuple[int, ...]
    aliases: tuple[str, ...]
    link: Link
    before: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The name, and then the aliases."""
        return (self.name, *self.aliases)

    @property
    def nbytes(self) -> int:
        """Bytes of `indices` and `values`."""
        return self.indices.nbytes + self.values.nbytes

    @property
    def where(self) -> str:
        """The patch, for messages."""
        return f"{self.name!r} ({self.link.where})"
