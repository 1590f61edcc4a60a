"""The user's optimizer over whole tensors. A group of which this rank owns nothing holds a stand-in
without a gradient, which every optimizer skips: all ranks have the same groups, and step them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from layerzero.flat.parameter_info import info_of

Group = dict[str, Any]
_NOT_OPTIONS = ("params", "param_names")


def options_of(group: Mapping[str, Any]) -> Group:
    """A parameter group without its parameters."""
    return {key: value for key, value in group.items() if key not in _NOT_OPTIONS}


def stand_in_for(parameter: nn.Parameter) -> nn.Parameter:
    """A parameter of one element, with as many dimensions as the whole tensor."""
    ones = (1,) * info_of(parameter).ndim
    return nn.Parameter(parameter.detach().new_zeros(ones), requires_grad=parameter.requires_grad)


class Factory(NamedTuple):
    """How to make the user's optimizer."""

    cls: type[torch.optim.Optimizer]
    options: Mapping[str, Any]
    is_flat: bool
    """Pass the parameters of the only group as a list, which is all that some classes take."""

    def check(self, refused: tuple[type, ...]) -> None:
        """
        Args:
            refused: classes that need more than the gradients of one tensor.

        Raises:
            TypeError: it is no optimizer class, or its `step` needs a closure.
        """
        cls: Any = self.cls
        if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
            is_made = isinstance(cls, torch.optim.Optimizer)
            got = f"an instance of {type(cls).__name__}" if is_made else repr(cls)
            raise TypeError(
                "WholeTensorOptimizer: expected a class derived from torch.optim.Optimizer, got "
                f"{got}; pass the class, and its options by keyword"
            )
        closure = inspect.signature(cls.step).parameters.get("closure")
        needs_closure = closure is not None and closure.default is inspect.Parameter.empty
        if needs_closure or issubclass(cls, refused):
            raise TypeError(
                f"WholeTensorOptimizer: {cls.__name__} needs a closure that it calls during its "
                "step, or the gradients of all parameters together; an owner has those of its own "
                "tensors. Use a class that treats each tensor by itself"
            )

    def make(self, groups: Sequence[Group]) -> torch.optim.Optimizer:
        """The optimizer over these groups.

        Raises:
            TypeError: the class has rearranged the groups.
            Exception: whatever the class raises.
        """
        given = [{**options_of(group), "params": list(group["params"])} for group in groups]
        made = self.cls(given[0]["params"] if self.is_flat else given, **self.options)
        own = [[id(p) for p in group["params"]] for group in made.param_groups]
        if own != [[id(p) for p in group["params"]] for group in groups]:
            raise TypeError(
                f"WholeTensorOptimizer: {self.cls.__name__} makes parameter groups of its own; "
                "make one WholeTensorOptimizer for each of its groups"
            )
        return made

    def make_prototype(self, groups: Sequence[Group]) -> torch.optim.Optimizer:
        """The optimizer over stand-ins alone: for its checks, defaults and options.

        Raises:
            Exception: whatever the class raises.
        """
        return self.make([{**g, "params": [*map(stand_in_for, g["params"])]} for g in groups])


def load(
    optimizer: torch.optim.Optimizer,
    state_dict: Mapping[str, Any],
    tensors: Sequence[nn.Parameter | None],
) -> None:
    """Load whole states, and options of the groups.

    Args:
        state_dict: as of a torch optimizer over `tensors`; None: not on this rank.
    """
    numbers = {id(p): number for number, p in enumerate(tensors) if p is not None}
    states: dict[int, Any] = {}
    groups: list[Group] = []
    end = 0
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        start, end = end, end + len(group["params"])
        for place, parameter in enumerate(group["params"], start):
            number = numbers.get(id(parameter))
            if number in state_dict["state"]:
                states[place] = state_dict["state"][number]
        groups.append({**options_of(saved), "params": [*range(start, end)]})
    optimizer.load_state_dict({"state": states, "param_groups": groups})


def step(optimizer: torch.optim.Optimizer, groups: Sequence[Group]) -> Exception | None:
    """Step with the options of `groups`, and drop the gradients. Returns the error of the step: the
    values of the other ranks have to travel first."""
    for own, given in zip(optimizer.param_groups, groups, strict=True):
        own.update(options_of(given))
    try:
        optimizer.step()
    except Exception as error:
        return error
    finally:
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                tensor.grad = None
    return None
