"""JoinedOptimizers: how optimizers of a rank without batches follow the others'."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from layerzero.optim.in_backward import whole_groups

_HAS_GRADIENTS, _IS_NONE, _IS_ZERO = range(3)


class JoinedOptimizers:
    are_clipped = False
    """Whether gradients are being clipped, which ends before the next request."""

    def __init__(
        self, optimizers: Sequence[torch.optim.Optimizer], parameters: Sequence[nn.Parameter]
    ) -> None:
        self.all = tuple(optimizers)
        self._parameters = parameters
        self.note_gradients()

    def note_gradients(self) -> None:
        """Gradients are complete: what is zero now is so by its values, not as it was cleared."""
        self.are_clipped = False
        self._noted = {p: _version_of(p) for each in self._sets() for p in each}

    def state(self, looks: bool) -> list[float]:
        """For each of `_sets`, whether gradients are None, or cleared to zero (only if `looks`);
        then the numbers among the options of all param groups."""
        if self.are_clipped:
            self.note_gradients()
        options = (tree_leaves(_options_of(group)) for group in self._groups())
        numbers = [float(value) for value in chain(*options) if _is_number(value)]
        return [*(self._state_of(each, looks) for each in self._sets()), *numbers]

    def follow(self, others: Sequence[Sequence[float]]) -> None:
        """Copy the options of the others, and zero the gradients that are zero or None on all.
        `others`: `state` of the other ranks."""
        numbers = iter(others[0][len(self.all) + 1 :])

        def copy(value: Any) -> Any:
            number = next(numbers)
            return value.fill_(number) if isinstance(value, torch.Tensor) else type(value)(number)

        for group in self._groups():
            group.update(tree_map_only(_is_number, copy, _options_of(group)))
        rest = nn.ParameterList(self._sets()[-1])
        for each, *found in zip((*self.all, rest), *others, strict=False):
            if _HAS_GRADIENTS not in found:
                each.zero_grad(set_to_none=all(state == _IS_NONE for state in found))

    def _sets(self) -> list[list[nn.Parameter]]:
        """The model's parameters that are cleared together: of each optimizer, and of none."""
        sets = [[*chain(*whole_groups(each))] for each in self.all]
        return [*sets, [*{*self._parameters}.difference(*sets)]]

    def _state_of(self, parameters: list[nn.Parameter], looks: bool) -> int:
        found = [(p, p.grad) for p in parameters if p.grad is not None]
        if not found:
            return _IS_NONE
        is_zero = looks and not any(
            self._noted.get(p) == _version_of(p) or bool(gradient.any()) for p, gradient in found
        )
        return _IS_ZERO if is_zero else _HAS_GRADIENTS

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.all for group in optimizer.param_groups]


def _options_of(group: dict[str, Any]) -> dict[str, Any]:
    return {name: group[name] for name in sorted(group.keys() - {"params"})}


def _version_of(parameter: nn.Parameter) -> tuple[int, int]:
    """What changes when its `.grad` is replaced or written."""
    return id(parameter.grad), -1 if parameter.grad is None else parameter.grad._version


def _is_number(value: object) -> bool:
    return isinstance(value, (bool, int, float)) or (
        isinstance(value, torch.Tensor) and value.numel() == 1
    )
