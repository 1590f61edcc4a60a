"""Which model a piece belongs to: for functions that get tensors, and not the model they are of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple
from weakref import WeakSet

from torch import nn

from layerzero.core.placement import Placement
from layerzero.runtime.root import RootState, root_of

_roots: WeakSet[RootState] = WeakSet()
"""Of all models that are alive; a root whose units joined another one has none of its own."""


class Owner(NamedTuple):
    """A piece, and where the other pieces of its flat parameter are."""

    root: RootState
    placement: Placement
    piece: nn.Parameter

    @property
    def is_tensor_parallel(self) -> bool:
        return any(group.size > 1 for group in self.root.tensor_parallel_groups)

    @property
    def speaks(self) -> bool:
        """Whether this rank gives the warnings of the model: the first of all that share it."""
        placement = self.placement.data_parallel or self.placement
        return placement.is_first and all(g.is_first for g in self.root.tensor_parallel_groups)


def remember_root(root: RootState) -> None:
    _roots.add(root)


def owners(root: RootState) -> Iterator[Owner]:
    """The pieces of one model, unit by unit."""
    for unit in root.units:
        if root_of(unit) is root:
            for handle in unit.handles:
                for piece in handle.sharded_params:
                    yield Owner(root, handle.placement, piece)


def owner_of_each() -> dict[int, Owner]:
    """The pieces of all models, by `id`. A pass over all of them: not for every step."""
    return {id(owner.piece): owner for root in list(_roots) for owner in owners(root)}
