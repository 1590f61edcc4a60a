"""Finds and runs the hooks that users register on sharded parameters.

Sharded parameters are in no autograd graph, so autograd would never run their hooks. One that has
hooks gets its reduced gradient from autograd itself, in a backward pass that only accumulates it:
hooks of every kind then run in their usual order, see this backward's gradient, and may replace it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

STEPPED_BY_TORCH = "_in_backward_optimizers"
"""torch's mark on a parameter given to `_apply_optimizer_in_backward`, which shows no hook."""


def kind_of_hooks(parameter: nn.Parameter) -> str | None:
    """Name of the function that registered hooks on a parameter; None: it has none."""
    if parameter._backward_hooks:
        return "register_hook"
    if parameter._post_accumulate_grad_hooks:
        return "register_post_accumulate_grad_hook"
    return "_apply_optimizer_in_backward" if STEPPED_BY_TORCH in parameter.__dict__ else None


def refuse_gradients(original: nn.Parameter, fqn: str) -> None:
    """Raise in a backward that gives the parameter of before wrapping a gradient, which would train
    nothing."""

    def refuse(_: torch.Tensor) -> None:
        raise RuntimeError(
            f"backward computed a gradient of {fqn!r} as it was before wrapping: a list, a closure "
            "or another module still holds the former parameter, which is not trained any more; in "
            "forward, read it from its module (self.weight)"
        )

    if original.requires_grad:
        original.register_post_accumulate_grad_hook(refuse)


_running: list[object] = []
"""The backward passes of this file that are running. Not thread-local: autograd may run hooks in
threads of its own."""


def is_accumulating() -> bool:
    """Whether a backward pass of `accumulate_with_hooks` is running."""
    return bool(_running)


def accumulate_with_hooks(gradients: Sequence[tuple[nn.Parameter, torch.Tensor]]) -> None:
    """Add to `.grad` of each parameter as a backward pass does, and run its hooks.

    All gradients go through one pass, as hooks on several parameters need
    (`register_multi_grad_hook`). Parameters must come in the same order on every rank, because
    hooks may be collective. A parameter may come several times: its hooks see the sum.
    """
    parameters, values = zip(*gradients, strict=True)
    # Frozen since its forward: hooks see what earlier micro-batches have added.
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    _running.append(parameters)
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        with torch.no_grad():
            torch.autograd.backward(parameters, values)
    finally:
        _running.pop()
        for parameter in frozen:
            parameter.requires_grad_(False)
