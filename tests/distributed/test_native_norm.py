"""The norm that native optimizers clip by is never that of other gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import layerzero
from layerzero import MixedPrecision, ZeRO3
from layerzero.optim import SGD, AdamW
from layerzero.optim import norm as norm_module
from tests.harness.checks import assert_same_on_all_ranks, assert_within
from tests.harness.compare import assert_norm_of_gradients, zero3
from tests.harness.models import Block, Mlp
from tests.harness.ranks import run_ranks
from tests.harness.reference import forward_backward

_BF16 = {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)}


@contextmanager
def _passes() -> Iterator[list[int]]:
    """Elements of each pass over gradients that only sums squares."""
    found: list[int] = []
    real: Callable[[torch.Tensor], torch.Tensor] = vars(norm_module)["sum_squares"]

    def counted(x: torch.Tensor) -> torch.Tensor:
        found.append(x.numel())
        return real(x)

    vars(norm_module)["sum_squares"] = counted
    try:
        yield found
    finally:
        vars(norm_module)["sum_squares"] = real


def _batch(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * seed + dist.get_rank())
    return torch.randn(2, 5, generator=generator)


def _watched(**options: Any) -> tuple[ZeRO3, AdamW]:
    model = zero3(Mlp, Block, **options)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    optimizer.clip_grad_norm_(1.0)
    return model, optimizer


def _assert_right(model: ZeRO3, optimizer: AdamW, what: str) -> None:
    norm = optimizer.clip_grad_norm_(1e9)
    wide = [each.grad.double() for each in model.parameters() if each.grad is not None]
    like = [each for each in model.parameters() if each.grad is not None]
    true = layerzero.global_norm(wide, like=like).float()
    # Summed in float64: only a tie in the one rounding to float32 may fall to another side.
    assert_within(norm, true, torch.finfo(torch.float32).eps * true.item(), what)
    assert_same_on_all_ranks(norm, what)


def _replace_one(model: nn.Module) -> None:
    parameter = next(each for each in model.parameters() if each.numel())
    assert parameter.grad is not None
    parameter.grad = parameter.grad * 5.0


def _drop_one(model: nn.Module) -> None:
    next(each for each in model.parameters() if each.numel()).grad = None


def _move_to_one_buffer(model: nn.Module) -> None:
    """As trainers do that keep the gradients of the whole model in one buffer."""
    parameters = [*model.parameters()]
    grads = [each.grad.clone() for each in parameters if each.grad is not None]
    parts = torch.cat(grads).split([each.numel() for each in grads])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad = part


def _accumulate(model: ZeRO3) -> None:
    with model.no_sync():
        forward_backward(model, _batch(78))
    forward_backward(model, _batch(79))


def _fail(model: nn.Module) -> None:
    output = model(_batch(80))

    def fail(_: torch.Tensor) -> None:
        raise ArithmeticError

    output.register_hook(fail)
    with pytest.raises(ArithmeticError):
        output.sum().backward()
    model(_batch(81))  # Ends the pass that failed.


def _edits() -> None:
    edits = _replace_one, _drop_one, _move_to_one_buffer, _accumulate, _fail
    for options in ({}, _BF16):
        for edit in edits:
            model, optimizer = _watched(**options)
            for step in range(2):
                forward_backward(model, _batch(step))
                edit(model)
                _assert_right(model, optimizer, f"{options} {edit.__name__}")
                optimizer.step()
                optimizer.zero_grad()


def _quadruple(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(4.0)


def _hooks_and_halves() -> None:
    model = zero3(Mlp, Block)
    parameters = [*model.parameters()]
    halves = AdamW(parameters[::2], lr=1e-2), SGD(parameters[1::2], lr=1e-2)
    for optimizer in halves:
        optimizer.clip_grad_norm_(1.0)
    for step in range(2):
        forward_backward(model, _batch(step))
        norms = [optimizer.clip_grad_norm_(1e9).double() for optimizer in halves]
        both = (norms[0] ** 2 + norms[1] ** 2).sqrt().float()
        assert_norm_of_gradients(both, model)
        for optimizer in halves:
            optimizer.zero_grad()
    model, optimizer = _watched()
    for parameter in list(model.parameters())[::3]:
        parameter.register_post_accumulate_grad_hook(_quadruple)
        parameter.register_hook(lambda grad: grad * 2)
    for step in range(2):
        forward_backward(model, _batch(step))
        _assert_right(model, optimizer, "hooks")
        optimizer.zero_grad()
    model, optimizer = _watched()
    model.blocks[0].requires_grad_(False)
    forward_backward(model, _batch(3))
    _assert_right(model, optimizer, "frozen")


def _stale() -> None:
    _edits()
    _hooks_and_halves()


@pytest.mark.parametrize(
    "world_size", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3))]
)
def test_a_norm_is_never_that_of_other_gradients(world_size: int) -> None:
    run_ranks(world_size, _stale)


def _summed_at_once(patch: pytest.MonkeyPatch) -> None:
    calls = [0]

    def counted(*args: Any, real: Any = torch._foreach_norm, **options: Any) -> Any:
        calls[0] += 1
        return real(*args, **options)

    patch.setattr(torch, "_foreach_norm", counted)
    patch.setattr(norm_module, "_is_on_device", lambda _: True)
    model, optimizer = _watched()
    calls[0] = 0
    with _passes() as passes:
        forward_backward(model, _batch(0))
        optimizer.clip_grad_norm_(1.0)
    # Of all gradients, and of what this rank's come to.
    assert not passes and calls == [2]
    _edits()
    _hooks_and_halves()


def _as_on_a_device() -> None:
    with pytest.MonkeyPatch.context() as patch:
        _summed_at_once(patch)


def test_a_device_sums_the_squares_of_all_flat_parameters_in_one_call() -> None:
    run_ranks(2, _as_on_a_device)
