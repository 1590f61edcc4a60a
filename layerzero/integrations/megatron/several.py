"""SeveralOptimizers: several torch optimizers by name, in the place of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from layerzero.integrations.engine import some

StateDict = dict[str, Any]


class SeveralOptimizers:
    """Steps several optimizers one after the other; what `ZeRO3Optimizer` needs of an optimizer.

    Attributes:
        optimizers: by name, as `layerzero.checkpoint.save` and `load` take them.
    """

    def __init__(self, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        self.optimizers = dict(optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all; changes of their options reach the optimizers."""
        return [group for each in self.optimizers.values() for group in each.param_groups]

    @property
    def state(self) -> dict[Any, Any]:
        """The states of all, by parameter; a new dict."""
        states: dict[Any, Any] = {}
        for each in self.optimizers.values():
            states |= each.state
        return states

    def step(self) -> None:
        for each in self.optimizers.values():
            each.step()

    def state_dict(self) -> StateDict:
        return {name: each.state_dict() for name, each in self.optimizers.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.check_names(state_dict)
        for name, each in self.optimizers.items():
            each.load_state_dict(state_dict[name])

    def check_names(self, state: Mapping[str, Any]) -> None:
        if state.keys() != self.optimizers.keys():
            raise ValueError(
                f"the optimizer state is of {some(sorted(map(str, state)))}, but the optimizers "
                f"are {some(sorted(self.optimizers))}; make the optimizers of the saved run"
            )


AnyOptimizer = torch.optim.Optimizer | SeveralOptimizers


def optimizers_in(optimizer: AnyOptimizer) -> list[torch.optim.Optimizer]:
    if isinstance(optimizer, SeveralOptimizers):
        return list(optimizer.optimizers.values())
    return [optimizer]


def one_or_several(
    made: Any, groups: Sequence[Mapping[str, Any]], names: Mapping[int, str]
) -> AnyOptimizer:
    """What `make_optimizer` returned, checked.

    Args:
        groups: what it was given.
        names: of the parameters, by id.

    Raises:
        TypeError: it returned neither an optimizer nor a dict of optimizers by name.
        ValueError: a parameter is in two optimizers, or a trained one in none.
    """
    held: dict[int, str] = {}
    for name, each in (made if isinstance(made, Mapping) else {"": made}).items():
        if not isinstance(name, str) or not hasattr(each, "param_groups"):
            raise TypeError(
                "make_optimizer: expected an optimizer, or a dict of optimizers by name, got "
                f"{name!r}: {type(each).__name__}"
            )
        for parameter in parameters_in(each.param_groups):
            if id(parameter) in held:
                raise ValueError(
                    f"make_optimizer: {names.get(id(parameter), 'a parameter')} is in two "
                    f"optimizers, {held[id(parameter)]!r} and {name!r}; give it to one"
                )
            held[id(parameter)] = name
    if not isinstance(made, Mapping):
        optimizer: torch.optim.Optimizer = made
        return optimizer
    left = [names[id(p)] for p in parameters_in(groups) if p.requires_grad and id(p) not in held]
    if left:
        raise ValueError(f"make_optimizer: no optimizer has {some(left)}; give each to one")
    return SeveralOptimizers(made)


def parameters_in(groups: Sequence[Mapping[str, Any]]) -> list[nn.Parameter]:
    """Parameters in the order of their numbers in a state dict."""
    return [parameter for group in groups for parameter in group["params"]]
