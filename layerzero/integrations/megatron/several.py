"""SeveralOptimizers: several torch optimizers by name, in the place of one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from layerzero.checkpoint.adapters import keeps_whole_states
from layerzero.integrations.engine import some


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

    def state_dict(self) -> dict[str, Any]:
        return {name: each.state_dict() for name, each in self.optimizers.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        for name, each in self.optimizers.items():
            each.load_state_dict(state_dict[name])


AnyOptimizer = torch.optim.Optimizer | SeveralOptimizers


def one_or_several(
    made: Any,
    groups: Sequence[Mapping[str, Any]],
    names: Mapping[int, str],
    tensor_parallel_size: int,
) -> AnyOptimizer:
    """What `make_optimizer` returned for the groups, checked. `names`: of parameters, by id."""
    optimizers = list(made.values()) if isinstance(made, Mapping) else [made]
    held = Counter(id(p) for each in optimizers for p in parameters_in(each.param_groups))
    wrong = [names[id(p)] for p in parameters_in(groups) if p.requires_grad and held[id(p)] != 1]
    if isinstance(made, Mapping) and wrong:
        raise ValueError(f"make_optimizer: {some(wrong)} are in none or in several of {[*made]}")
    split = [
        names.get(id(parameter), "a parameter")
        for each in optimizers
        if tensor_parallel_size > 1 and keeps_whole_states(each)
        for parameter in parameters_in(each.param_groups)
        if getattr(parameter, "tensor_model_parallel", False)
    ]
    if split:
        raise NotImplementedError(
            f"make_optimizer: WholeTensorOptimizer needs whole tensors, but {some(split)} are "
            f"split over {tensor_parallel_size} tensor-parallel ranks; make an element-wise one"
        )
    return SeveralOptimizers(made) if isinstance(made, Mapping) else made


def parameters_in(groups: Sequence[Mapping[str, Any]]) -> list[nn.Parameter]:
    """Parameters in the order of their numbers in a state dict."""
    return [parameter for group in groups for parameter in group["params"]]
