"""Chain: how far a receiver's tensors have followed each sender, kept with their memory.

A receiver is a dict of tensors, and has no object of ours. `model.state_dict()` makes new tensor
objects at each call, but they share their storage, which torch keeps as one object: so that is
where positions are. A copy of a tensor has none.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from layerzero.checkpoint.delta.patch import DeltaError, Link, Patch

_ATTRIBUTE = "_layerzero_delta"


@dataclass
class Position:
    """How far one sender's patches were applied."""

    chain: str
    number: int
    """Of the last patch."""
    part: int | None = None
    """The last part of a `full()` that is incomplete; None: it is complete."""


@dataclass
class Mark:
    """What is known about one tensor of a receiver."""

    stream: str | None = None
    """The stream whose values it holds."""
    positions: dict[int, Position] = field(default_factory=dict)
    """By sender, for those whose anchor it is."""

    def follow(self, stream: str) -> None:
        """From now on it holds values of `stream`; forgets chains of another one."""
        if self.stream != stream:
            self.stream = stream
            self.positions.clear()

    def move(self, link: Link) -> None:
        """Record that the patch of `link` was applied."""
        part = link.part if link.part + 1 < link.parts else None
        self.positions[link.sender] = Position(link.chain, link.number, part)


def mark_of(tensor: torch.Tensor) -> Mark:
    storage = tensor.untyped_storage()
    marks: dict[int, Mark] | None = getattr(storage, _ATTRIBUTE, None)
    if marks is None:
        marks = {}
        setattr(storage, _ATTRIBUTE, marks)
    return marks.setdefault(int(tensor.storage_offset()), Mark())


def check_link(patch: Patch, mark: Mark, anchor: Mark) -> bool:
    """Check that a patch comes next; returns whether it is the first one of its sender here.

    Args:
        mark: of the patch's tensor.
        anchor: of the tensor that its link names.

    Raises:
        DeltaError: it is of another stream, or a patch was lost, or it was applied before.
    """
    link, found = patch.link, anchor.positions.get(patch.link.sender)
    if link.parts:
        before = Position(link.chain, link.number, link.part - 1)
        if link.part and (anchor.stream != link.stream or found != before):
            raise DeltaError(
                f"{patch.where}: a part was lost or repeated; apply all parts of one full(), in "
                "order"
            )
        return False
    is_of_stream = mark.stream in (None, link.stream)
    if is_of_stream and found is None and link.after == 0:
        return True
    if is_of_stream and found is not None and found.chain == link.chain and found.part is None:
        if link.after <= found.number < link.number:
            return False
        problem = "is repeated" if found.number >= link.number else "patches before it were lost"
        problem += f": the tensors are at patch {found.number}"
    else:
        problem = "these tensors have not followed the sender's stream"
    raise DeltaError(f"{patch.where}: {problem}; apply full() of every rank to begin again")
