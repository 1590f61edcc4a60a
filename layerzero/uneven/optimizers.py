"""JoinedOptimizers: how optimizers of a rank without batches follow the others'."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from layerzero.optim.in_backward import whole_groups

_HAS_GRADIENTS, _IS_NONE, _IS_ZERO = range(3)


class JoinedOptimizers:
    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.all = tuple(optimizers)

    def options(self) -> list[int]:
        """The options of all param groups, each as the bits of a float64."""
        values = (value for group, name in self._options() for value in tree_leaves(group[name]))
        return [bits_of(float(value)) for value in values if _is_number(value)]

    def copy_options(self, options: Sequence[int]) -> None:
        others = iter(options)

        def copy(value: Any) -> Any:
            number = number_of(next(others))
            return value.fill_(number) if isinstance(value, torch.Tensor) else type(value)(number)

        for group, name in self._options():
            group[name] = tree_map_only(_is_number, copy, group[name])

    def _options(self) -> Iterator[tuple[dict[str, Any], str]]:
        for optimizer in self.all:
            for group in optimizer.param_groups:
                for name in sorted(group.keys() - {"params"}):
                    yield group, name

    def gradient_states(self, looks: bool) -> list[int]:
        """For each optimizer, whether its gradients are None, or zero (only if `looks`)."""
        return [_state_of(each, looks) for each in self.all]

    def zero_like(self, states: Sequence[Sequence[int]]) -> None:
        """Zero the gradients of the optimizers whose gradients are zero or None on all others.

        Args:
            states: `gradient_states` of the other ranks.
        """
        for optimizer, found in zip(self.all, zip(*states, strict=True), strict=False):
            if _HAS_GRADIENTS not in found:
                optimizer.zero_grad(set_to_none=all(state == _IS_NONE for state in found))


def bits_of(number: float) -> int:
    """A float as 64 bits."""
    bits: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return bits


def number_of(bits: int) -> float:
    """The float of `bits_of`."""
    number: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return number


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
