"""Finds the model of a sharded parameter, for functions that receive tensors instead of a model;
and checks what optimizers of this package are given.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple
from weakref import WeakSet

import torch
from torch import nn

from layerzero.flat.parameter_info import get_info
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


def check_parameters(
    what: str,
    parameters: Sequence[nn.Parameter],
    earlier: Sequence[nn.Parameter] = (),
    takes_ignored: bool = True,
) -> None:
    """Check parameters that are given to an optimizer. `what`: class of the optimizer, for
    messages. `earlier`: those that it has already. `takes_ignored`: accept the model's ignored
    parameters, too."""
    known = owner_of_each()
    # Of the first sharded parameter; the one that belongs elsewhere is named by its own.
    first = next((known[id(p)] for p in (*earlier, *parameters) if id(p) in known), None)
    root = None if first is None else first.root
    for parameter in parameters:
        if not isinstance(parameter, torch.Tensor):
            raise TypeError(f"{what}: expected parameters, got {type(parameter).__name__}")
        owner = known.get(id(parameter))
        if owner is None and not (takes_ignored and root and _is_ignored(root, parameter)):
            raise ValueError(
                f"{what}: parameter {name_of(parameter)} belongs to no ZeRO3 module; wrap the "
                "model first, pass its parameters() outside summon_full_params, and give "
                "parameters that it does not shard to an optimizer of torch"
            )
        if owner is not None and first is not None and owner.root is not root:
            raise ValueError(
                f"{what}: parameter {name_of(parameter)} belongs to another ZeRO3 module than "
                f"{name_of(first.sharded_param)}; build one optimizer for each model"
            )


def _is_ignored(root: RootState, parameter: nn.Parameter) -> bool:
    ignored = root.ignored.now()
    inside = (each for module in ignored.modules for each in module.parameters())
    return any(parameter is each for each in (*ignored.parameters, *inside))


def refuse_in_graph(what: str, root: RootState | None) -> None:
    if root is not None and root.streams.is_capturing():
        raise RuntimeError(
            f"{what}.step: a graph would repeat the rate of this step; step after the replay"
        )


def name_of(parameter: torch.Tensor) -> str:
    """A parameter's FQN in quotes; of one that is not sharded, its shape."""
    info = get_info(parameter) if isinstance(parameter, nn.Parameter) else None
    return f"of shape {tuple(parameter.shape)}" if info is None else repr(info.fqn)
