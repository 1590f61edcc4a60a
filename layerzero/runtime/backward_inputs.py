"""Refuses `backward(inputs=...)` of sharded parameters, which would compute nothing.

Autograd's graph ends at the full parameters. So to be asked for the gradients of sharded ones alone
is, for autograd, to be asked for leaves that the loss does not depend on: it returns at once, and
says nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from layerzero.core.data_watch import grad_of
from layerzero.core.parameter_info import get_info

_PLACE = 5
"""Of `inputs` among the arguments of `torch.autograd.backward`."""
_MARK = "_layerzero_backward"


def refuse_sharded_inputs() -> None:
    """Have `torch.autograd.backward`, and with it `Tensor.backward`, refuse them from now on."""
    plain = torch.autograd.backward
    if hasattr(plain, _MARK):
        return

    @functools.wraps(plain)
    def backward(*args: Any, **kwargs: Any) -> None:
        inputs = kwargs.get("inputs", args[_PLACE] if len(args) > _PLACE else None)
        if inputs is None:
            return plain(*args, **kwargs)
        if isinstance(inputs, Iterator):  # It can be read once.
            inputs = kwargs["inputs"] = [*inputs]
            args = args[:_PLACE]
        sharded = _sharded_ones(inputs)
        before = [_gradient_of(each) for each in sharded]
        plain(*args, **kwargs)
        # A penalty on sharded parameters, which the graph does reach, gives them gradients.
        if sharded and before == [_gradient_of(each) for each in sharded]:
            names = ", ".join(repr(get_info(each).fqn) for each in sharded[:3])  # type: ignore[union-attr]
            raise NotImplementedError(
                f"backward(inputs=...): {names}{', ...' if len(sharded) > 3 else ''} are sharded, "
                "and got no gradient: autograd knows the full parameters only. Leave `inputs` out, "
                "and set requires_grad=False for parameters that are to get none"
            )

    setattr(backward, _MARK, True)
    torch.autograd.backward = backward


def _sharded_ones(inputs: Any) -> list[nn.Parameter]:
    if isinstance(inputs, torch.Tensor):
        inputs = [inputs]
    elif isinstance(inputs, Mapping):
        inputs = inputs.values()
    return [each for each in inputs if isinstance(each, nn.Parameter) and get_info(each)]


def _gradient_of(parameter: nn.Parameter) -> tuple[int, int] | None:
    gradient = grad_of(parameter)
    return None if gradient is None else (id(gradient), gradient._version)
