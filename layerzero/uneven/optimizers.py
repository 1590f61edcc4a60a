"""JoinedOptimizers: how optimizers of a rank without batches follow the others'."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from layerzero.optim.in_backward import whole_groups

_HAS_GRADIENTS, _IS_NONE, _IS_ZERO = range(3)


class JoinedOptimizers:
    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.all = tuple(optimizers)

    def state(self, looks: bool) -> list[float]:
        """For each optimizer, whether its gradients are None, or zero (only if `looks`); then the
        numbers among the options of all param groups."""
        options = (tree_leaves(_options_of(group)) for group in self._groups())
        numbers = [float(value) for value in chain(*options) if _is_number(value)]
        return [*(_state_of(each, looks) for each in self.all), *numbers]

    def follow(self, others: Sequence[Sequence[float]]) -> None:
        """Copy the options of the others, and zero the gradients that are zero or None on all.

        Args:
            others: `state` of the other ranks.
        """
        numbers = iter(others[0][len(self.all) :])

        def copy(value: Any) -> Any:
            number = next(numbers)
            return value.fill_(number) if isinstance(value, torch.Tensor) else type(value)(number)

        for group in self._groups():
            group.update(tree_map_only(_is_number, copy, _options_of(group)))
        for optimizer, *found in zip(self.all, *others, strict=False):
            if _HAS_GRADIENTS not in found:
                optimizer.zero_grad(set_to_none=all(state == _IS_NONE for state in found))

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.all for group in optimizer.param_groups]


def _options_of(group: dict[str, Any]) -> dict[str, Any]:
    return {name: group[name] for name in sorted(group.keys() - {"params"})}


def _state_of(optimizer: torch.optim.Optimizer, looks: bool) -> int:
    parameters = chain(*whole_groups(optimizer))
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return _IS_NONE
    is_zero = looks and not any(bool(gradient.any()) for gradient in gradients)
    return _IS_ZERO if is_zero else _HAS_GRADIENTS


def _is_number(value: object) -> bool:
    return isinstance(value, (bool, int, float)) or (
        isinstance(value, torch.Tensor) and value.numel() == 1
    )
