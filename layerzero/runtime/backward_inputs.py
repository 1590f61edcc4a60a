"""Refuses `backward(inputs=...)` and `torch.autograd.grad` of sharded parameters, which would
compute nothing.

Autograd's graph ends at the full parameters. So to be asked for the gradients of sharded ones alone
is, for autograd, to be asked for leaves that the loss does not depend on: it returns at once, and
says nothing, or that they were not used (which `allow_unused` turns into None, and
`materialize_grads` into zeros).

Other backwards pass through here, too, so this is also where one can learn that they are over.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.jit._builtins import _register_builtin

from layerzero.core.data_watch import grad_of
from layerzero.core.parameter_info import get_info

_PLACE = 5
"""Of `inputs` among the arguments of `torch.autograd.backward`."""
_MARK = "_layerzero_backward"

after_backward: list[Callable[[], object]] = []
"""Called after each backward without `inputs`; those of reentrant checkpoints are among them."""


def refuse_sharded_inputs() -> None:
    """Have `torch.autograd.backward`, and with it `Tensor.backward`, refuse them from now on."""
    plain = torch.autograd.backward
    if hasattr(plain, _MARK):
        return

    @functools.wraps(plain)
    def backward(*args: Any, **kwargs: Any) -> None:
        inputs = kwargs.get("inputs", args[_PLACE] if len(args) > _PLACE else None)
        if inputs is None:
            plain(*args, **kwargs)
            for function in after_backward[:]:
                function()
            return
        if isinstance(inputs, Iterator):  # It can be read once.
            inputs = kwargs["inputs"] = [*inputs]
            args = args[:_PLACE]
        sharded = _sharded_ones(inputs)
        before = [_gradient_of(each) for each in sharded]
        plain(*args, **kwargs)
        # A penalty on sharded parameters, which the graph does reach, gives them gradients.
        if sharded and before == [_gradient_of(each) for each in sharded]:
            raise NotImplementedError(
                f"backward(inputs=...): {_names(sharded)} are sharded, "
                "and got no gradient: autograd knows the full parameters only. Leave `inputs` out, "
                "and set requires_grad=False for parameters that are to get none"
            )

    setattr(backward, _MARK, True)
    torch.autograd.backward = backward
    torch.autograd.grad = _checked_grad(torch.autograd.grad)
    # TorchScript knows its operators by the functions' ids.
    _register_builtin(torch.autograd.backward, "aten::backward")
    _register_builtin(torch.autograd.grad, "aten::grad")


def _checked_grad(plain: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def grad(*args: Any, **kwargs: Any) -> Any:
        inputs = kwargs.get("inputs", args[1] if len(args) > 1 else None)
        if isinstance(inputs, Iterator):  # It can be read once.
            inputs = [*inputs]
            args, kwargs = _with_inputs(inputs, args, kwargs)
        if torch.compiler.is_compiling() or inputs is None or not _sharded_ones(inputs):
            return plain(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        is_filled = given.pop("materialize_grads", False)
        if is_filled:
            given["allow_unused"] = True
        try:
            found = plain(**given)
        except RuntimeError as error:
            if "not have been used in the graph" not in str(error):
                raise
            raise _refusal(_sharded_ones(inputs)) from error
        listed = [inputs] if isinstance(inputs, torch.Tensor) else [*inputs]
        missing = [each for each, gradient in zip(listed, found, strict=True) if gradient is None]
        # A penalty on sharded parameters, which the graph does reach, gives them gradients.
        if sharded := _sharded_ones(missing):
            raise _refusal(sharded)
        if is_filled and missing:
            pairs = zip(listed, found, strict=True)
            return tuple(torch.zeros_like(each) if g is None else g for each, g in pairs)
        return found

    return grad


def _with_inputs(
    inputs: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if "inputs" in kwargs:
        return args, {**kwargs, "inputs": inputs}
    return (args[0], inputs, *args[2:]), kwargs


def _refusal(sharded: list[nn.Parameter]) -> NotImplementedError:
    return NotImplementedError(
        f"torch.autograd.grad: {_names(sharded)} are sharded, and get no gradient by it: autograd "
        "knows the full parameters only. Call backward() and read `.grad`, which is this rank's "
        "part of the mean over ranks; or call torch.autograd.grad inside the forward of the unit "
        "that has the parameter, where it is whole"
    )


def _sharded_ones(inputs: Any) -> list[nn.Parameter]:
    if isinstance(inputs, torch.Tensor):
        inputs = [inputs]
    elif isinstance(inputs, Mapping):
        inputs = inputs.values()
    return [each for each in inputs if isinstance(each, nn.Parameter) and get_info(each)]


def _names(sharded: list[nn.Parameter]) -> str:
    names = ", ".join(repr(get_info(each).fqn) for each in sharded[:3])  # type: ignore[union-attr]
    return f"{names}{', ...' if len(sharded) > 3 else ''}"


def _gradient_of(parameter: nn.Parameter) -> tuple[int, int] | None:
    gradient = grad_of(parameter)
    return None if gradient is None else (id(gradient), gradient._version)
