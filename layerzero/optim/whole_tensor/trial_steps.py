"""Finds out by small trial steps whether an optimizer class treats each tensor by itself.

An owner steps its own tensors alone, a bucket at a time. That is right if the update of a tensor
depends on nothing but its own gradients and state. A class shows it: two small tensors are stepped
together, by an optimizer each, and in two calls of one step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from layerzero.optim.whole_tensor.inner import Factory, Group, Inner, options_of

_STEPS = 3
_SIZES = ((4, 6), (5, 3))
_SCALES = (1.0, 30.0)
"""Of the gradients: so that a norm over both tensors differs clearly from that of one."""
_MOST_OPERATIONS = 3000
_Tensors = list[torch.Tensor]
_StepOf = Callable[[Inner, list[nn.Parameter]], None]


def steps_bucket_by_bucket(factory: Factory, group: Group, ndim: int) -> bool:
    """Whether several calls of `step` may make one step; see Note [Several calls make one step].

    True also where trials fail, such as for kernels that need a device.

    Args:
        group: options of a parameter group.
        ndim: dimensions of the tensors in it.

    Raises:
        TypeError: tensors depend on each other, or the class communicates itself.
    """
    name = factory.cls.__name__
    given, options = options_of(group), dict(factory.options)
    for each in (given, options):
        if isinstance(each.get("lr"), (int, float)):
            each["lr"] = 0.01  # A schedule may begin at 0.
    factory = factory._replace(options=options)

    def run(step: _StepOf, seed: int = 0, chosen: tuple[int, ...] = (0, 1)) -> _Tensors:
        draw = torch.Generator().manual_seed(0)
        shapes = [(*sizes, *[2] * ndim)[:ndim] for sizes in _SIZES]
        drawn = range(_STEPS + 1)
        values = [[torch.randn(shape, generator=draw) for shape in shapes] for _ in drawn]
        tensors = [nn.Parameter(values[0][number].clone()) for number in chosen]
        torch.manual_seed(seed)
        stand_in = nn.Parameter(torch.zeros((1,) * ndim))
        inner = Inner(factory, [{**given, "params": tensors}], [stand_in])
        for gradients in values[1:]:
            for number, tensor in zip(chosen, tensors, strict=True):
                tensor.grad = gradients[number] * _SCALES[number]
            step(inner, tensors)
        return [tensor.detach() for tensor in tensors]

    try:
        with _no_traces():
            expected = run(_together)
            if not _are_close(expected, run(_together, seed=1)):
                return True  # It draws random numbers.
            apart = [run(_together, chosen=(number,))[0] for number in range(len(_SIZES))]
    except _CallsCollectives:
        raise TypeError(
            f"WholeTensorOptimizer: {name} communicates in its step, and would wait for ranks that "
            "own other tensors; use a class for one process, the owners do the rest"
        ) from None
    except Exception:
        return True
    if not _are_close(expected, apart):
        raise TypeError(
            f"WholeTensorOptimizer: {name} updates a tensor by what other tensors are (shown by a "
            "step on stand-in tensors), but an owner has only some of them; use a class that "
            "treats each tensor by itself"
        )
    try:
        with _no_traces():
            return _are_close(expected, run(_in_two_calls))
    except Exception:
        return False


def _together(inner: Inner, tensors: list[nn.Parameter]) -> None:
    inner.optimizer.step()


def _in_two_calls(inner: Inner, tensors: list[nn.Parameter]) -> None:
    step = inner.begin_step(inner.optimizer.param_groups)
    for tensor in tensors:
        step.call([tensor])
    step.end()


def _are_close(some: _Tensors, others: _Tensors) -> bool:
    return all(
        torch.allclose(one, other, rtol=1e-3, atol=1e-5, equal_nan=True)
        for one, other in zip(some, others, strict=True)
    )


class _CallsCollectives(Exception):
    """The step began a collective."""


class _Watched(TorchDispatchMode):
    """Stops a trial at a collective, or after too many operations."""

    _count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._count += 1
        if "c10d" in func.namespace:
            raise _CallsCollectives
        if self._count > _MOST_OPERATIONS:
            raise RuntimeError("a trial step takes too many operations")
        return func(*args, **(kwargs or {}))


@contextmanager
def _no_traces() -> Iterator[None]:
    """A context for trial steps: no hooks, no warnings, no collective, no random number drawn."""
    hooks: list[Any] = [_global_optimizer_pre_hooks, _global_optimizer_post_hooks]
    kept = [dict(each) for each in hooks]
    for each in hooks:
        each.clear()
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), _Watched():  # type: ignore[no-untyped-call]
            warnings.simplefilter("ignore")
            yield
    finally:
        for each, former in zip(hooks, kept, strict=True):
            each.update(former)
