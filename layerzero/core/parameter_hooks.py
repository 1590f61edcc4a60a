"""Hooks that users put on parameters: which there are, and how they run.

Pieces take part in no graph, so autograd would never run their hooks. A piece that has any gets its
reduced gradient from autograd itself, by a backward pass that consists of its accumulation alone:
hooks of every kind then run in their own order, see this backward's gradient, and may replace it.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Sequence

import torch
from torch import nn


def stepped_by_torch() -> Container[nn.Parameter]:
    """Parameters given to torch's `_apply_optimizer_in_backward`, whose hooks are not on them."""
    module = sys.modules.get("torch.distributed.optim.apply_optimizer_in_backward")
    found: Container[nn.Parameter] = () if module is None else module.param_to_acc_grad_map
    return found


def kind_of_hooks(parameter: nn.Parameter) -> str | None:
    """How the hooks on a parameter were put there; None: it has none."""
    if parameter._backward_hooks:
        return "register_hook"
    if parameter._post_accumulate_grad_hooks:
        return "register_post_accumulate_grad_hook"
    return "_apply_optimizer_in_backward" if parameter in stepped_by_torch() else None


class _Running:
    """Backward passes of ours that are under way; autograd may run hooks in threads of its own."""

    count = 0

    @classmethod
    def begin(cls) -> None:
        cls.count += 1

    @classmethod
    def end(cls) -> None:
        cls.count -= 1


def is_accumulating() -> bool:
    """Whether autograd accumulates gradients that we gave it."""
    return _Running.count > 0


def accumulate_with_hooks(gradients: Sequence[tuple[nn.Parameter, torch.Tensor]]) -> None:
    """Add to `.grad` of each parameter as a backward pass does, and run its hooks.

    All in one pass, for hooks of several parameters (`register_multi_grad_hook`). The order of
    parameters is the same on every rank. A parameter may come several times: its hooks see the sum.
    """
    parameters, values = zip(*gradients, strict=True)
    _Running.begin()
    try:
        with torch.no_grad():
            torch.autograd.backward(parameters, values)
    finally:
        _Running.end()
