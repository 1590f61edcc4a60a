"""Finds the model of a sharded parameter, for functions that receive tensors instead of a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple
from weakref import WeakSet

from torch import nn

from layerzero.flat.placement import Placement
from layerzero.step.root import RootState, root_if_alive
from layerzero.step.unit import get_unit

live_roots: WeakSet[RootState] = WeakSet()
"""Roots of all models, each added as it is built. If its units have joined another one, or were
unwrapped (`rewrap`), a root owns none: something else may keep it alive, on some ranks only."""


class Owner(NamedTuple):
    """A sharded parameter, its model, and the placement of its unit."""

    root: RootState
    placement: Placement
    sharded_param: nn.Parameter

    @property
    def is_tensor_parallel(self) -> bool:
        return any(group.size > 1 for group in self.root.tensor_parallel_groups)

    @property
    def issues_warnings(self) -> bool:
        """Whether this rank issues the model's warnings: it is the first of those that share it."""
        placement = self.placement.data_parallel or self.placement
        return placement.is_first and all(g.is_first for g in self.root.tensor_parallel_groups)


def owners(root: RootState) -> Iterator[Owner]:
    """The sharded parameters of one model, unit by unit."""
    for unit in root.units:
        if root_if_alive(unit) is root and any(get_unit(module) is unit for module in unit.owners):
            for handle in unit.handles:
                for sharded_param in handle.sharded_params:
                    yield Owner(root, handle.placement, sharded_param)


def owner_of_each() -> dict[int, Owner]:
    """The sharded parameters of all models, keyed by `id`. Visits all: not for every step."""
    return {id(owner.sharded_param): owner for root in list(live_roots) for owner in owners(root)}


def first_owner(parameters: Iterable[nn.Parameter]) -> Owner | None:
    """That of the first sharded parameter among these; visits all models, as `owner_of_each`."""
    known = owner_of_each()
    return next((known[id(each)] for each in parameters if id(each) in known), None)


def by_tensor() -> dict[int, nn.Parameter]:
    """The sharded parameters of all models, keyed by `id` of themselves and of their gradients."""
    found = {}
    for key, owner in owner_of_each().items():
        found[key] = owner.sharded_param
        if owner.sharded_param.grad is not None:
            found[id(owner.sharded_param.grad)] = owner.sharded_param
    return found
