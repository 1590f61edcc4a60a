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
    link = patch.link
    if link.parts:
        _check_part(patch, anchor)
        return False
    if mark.stream not in (None, link.stream):
        raise DeltaError(
            f"{patch.where}: the tensor holds values of another stream, {mark.stream}; apply "
            f"full() of stream {link.stream} from every rank first"
        )
    found = anchor.positions.get(link.sender)
    if found is None and link.after == 0:
        return True
    if found is None:
        problem = f"none of rank {link.sender} was applied to these tensors"
    elif found.chain != link.chain:
        problem = (
            f"it is of another stream than the patches of rank {link.sender} before (another "
            "DeltaStream object, or another run)"
        )
    elif found.part is not None:
        problem = f"full() of rank {link.sender} was applied up to part {found.part + 1} only"
    elif found.number >= link.number:
        problem = f"it is repeated, the tensors are at patch {found.number} of this rank"
    elif found.number < link.after:
        problem = f"patches were lost, the tensors are at patch {found.number} of this rank"
    else:
        return False
    raise DeltaError(
        f"{patch.where}: comes after patch {link.after}, and {problem}; apply full() of "
        f"rank {link.sender} to begin again"
    )


def _check_part(patch: Patch, anchor: Mark) -> None:
    link = patch.link
    if link.part == 0:
        return
    found = anchor.positions.get(link.sender)
    is_next = anchor.stream == link.stream and found == Position(
        link.chain, link.number, link.part - 1
    )
    if not is_next:
        before = "none" if found is None or found.part is None else f"part {found.part + 1}"
        raise DeltaError(
            f"{patch.where}: a part was lost or repeated, the last one applied is {before}; apply "
            "all parts of one full(), in order"
        )
