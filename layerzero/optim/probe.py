"""Tests on small tensors whether an optimizer updates parts of a parameter as it would the whole.

The test must have no side effects. It steps a copy of the optimizer with copied plain attributes,
on tensors of its own, restores random states, and runs no hooks and no collective. Where that is
impossible (an attribute that is no plain value, a required closure) there is no answer.
"""

from __future__ import annotations

import collections
import copy
import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import TorchDispatchMode

_ROWS, _COLUMNS, _STEPS = 4, 6, 4
_MOST_OPERATIONS = 3000
_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device)
_LEFT_OUT = {"param_groups", "state", "step", "zero_grad"}


class _NoAnswer(Exception):
    pass


class CallsCollectives(_NoAnswer):
    """The step began a collective."""


def differs_on_parts(optimizer: torch.optim.Optimizer, ndim: int, num_parts: int) -> bool | None:
    """Whether it updates 1-D parts of a parameter differently from the whole; None: unknown.

    Args:
        optimizer: stays unchanged.
        ndim: dimensions of the whole parameter, 1 or 2.
        num_parts: number of 1-D parts to compare with, 1 or 2.
    """
    whole = (_ROWS, _COLUMNS) if ndim == 2 else (_ROWS * _COLUMNS,)
    try:
        step = _own_step(type(optimizer))
        inspect.signature(step).bind(optimizer)  # TypeError if a closure is required.
        with no_traces():
            expected = _steps(optimizer, step, whole, 1, seed=0)
            if not torch.equal(expected, _steps(optimizer, step, whole, 1, seed=1)):
                return None  # It draws random numbers.
    except Exception:
        return None
    if not expected.isfinite().all():
        return None
    try:
        with no_traces():
            got = _steps(optimizer, step, (_ROWS * _COLUMNS // num_parts,), num_parts, seed=0)
    except _NoAnswer:
        return None
    except Exception:
        return True  # It takes whole parameters, and fails on 1-D parts.
    # Kernels may round differently by shape. Anything not element-wise is far off, because the
    # gradients of the two halves differ by orders of magnitude.
    return bool((got - expected).abs().max() > 1e-3 * expected.abs().max())


def _own_step(cls: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """`step` of the class, without torch's wrapper that runs hooks. Not of the instance, where a
    scheduler may have put a counting one."""
    step: Any = cls.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def _steps(
    optimizer: torch.optim.Optimizer,
    step: Callable[..., Any],
    shape: tuple[int, ...],
    num_parameters: int,
    seed: int,
) -> torch.Tensor:
    """The change of parameters of these shapes after a few steps, [_ROWS * _COLUMNS]."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(_ROWS * _COLUMNS, generator=generator)
    parameters = [nn.Parameter(part.clone().view(shape)) for part in start.chunk(num_parameters)]
    twin = _twin(optimizer, parameters)
    torch.manual_seed(seed)
    # Makes every norm, mean or maximum of a part differ clearly from that of the whole.
    scale = torch.logspace(-2, 1, _ROWS * _COLUMNS)
    for number in range(_STEPS):
        if number == _STEPS - 1:
            # So that momentum outweighs the gradient in a part: what masks by their signs, and
            # rescales by the mean of the mask (Lion with caution), differs, too.
            scale = scale.flip(0)
        gradient = torch.randn(_ROWS * _COLUMNS, generator=generator) * scale
        for parameter, part in zip(parameters, gradient.chunk(num_parameters), strict=True):
            parameter.grad = part.clone().view(shape)
        step(twin)
    return torch.cat([parameter.detach().view(-1) for parameter in parameters]) - start


def _twin(
    optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]
) -> torch.optim.Optimizer:
    twin = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name.startswith("_optimizer_"):
            twin.__dict__[name] = collections.OrderedDict()
        elif name not in _LEFT_OUT:
            twin.__dict__[name] = _copied(value)
    group = next(group for group in optimizer.param_groups if group["params"])
    options = {name: _copied(value) for name, value in group.items() if name != "params"}
    if "lr" in options:
        options["lr"] = 0.01  # A schedule may begin at 0.
    if options.get("weight_decay"):
        options["weight_decay"] = 0.1  # Else what depends on it is too small to be seen.
    twin.state = collections.defaultdict(dict)
    twin.param_groups = [{**options, "params": parameters}]
    return twin


def _copied(value: Any) -> Any:
    """A copy of plain values and small tensors.

    Raises:
        _NoAnswer: the value is something else, which a step might use or change.
    """
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, torch.Tensor) and value.numel() <= 1 and not value.requires_grad:
        return value.detach().clone()
    if type(value) in (list, tuple, set, frozenset) and len(value) < 100:
        return type(value)(_copied(each) for each in value)
    if type(value) in (dict, collections.OrderedDict) and len(value) < 100:
        return type(value)((copy.copy(key), _copied(each)) for key, each in value.items())
    raise _NoAnswer


class _Watched(TorchDispatchMode):
    """Stops the test at a collective, or after too many operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._count += 1
        if "c10d" in func.namespace:
            raise CallsCollectives
        if self._count > _MOST_OPERATIONS:
            raise _NoAnswer
        return func(*args, **(kwargs or {}))


@contextmanager
def no_traces() -> Iterator[None]:
    """A context for trial steps: no hooks, no warnings, no collective, no random number drawn."""
    hooks: list[Any] = [_global_optimizer_pre_hooks, _global_optimizer_post_hooks]
    kept = [dict(each) for each in hooks]
    for each in hooks:
        each.clear()
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), _Watched():
            warnings.simplefilter("ignore")
            yield
    finally:
        for each, former in zip(hooks, kept, strict=True):
            each.update(former)
