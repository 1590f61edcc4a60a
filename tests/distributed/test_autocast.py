"""Under torch.autocast a model trains as in plain torch, whatever passes share one autocast.

Inside a unit's call autocast keeps no casts (Note [A cast belongs to one call] in hooks.py). Where
a plain model uses a weight several times, it has the same bits with `cache_enabled=False`.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from layerzero import ZeRO3
from tests.harness.checks import named
from tests.harness.compare import assert_trains_alike, zero3
from tests.harness.models import Block, Mlp, loss_of
from tests.harness.ranks import on_ranks
from tests.harness.reference import mlp_batches, seeded


def autocast(model: nn.Module, **options: Any) -> torch.autocast:
    """The default for a wrapped model; without the cache for the plain one beside it."""
    defaults = {"dtype": torch.bfloat16, "cache_enabled": isinstance(model, ZeRO3)}
    return torch.autocast("cpu", **defaults | options)


def no_grad_pass_first(model: nn.Module, x: Tensor) -> Tensor:
    with autocast(model):
        with torch.no_grad():
            target = model(x.flip(0))
        loss = loss_of(model(x) - target)
    loss.backward()
    return loss.detach()


class _Stop(Exception):
    pass


def _stop(*_: object) -> None:
    raise _Stop


def after_a_pass_that_fails(model: nn.Module, x: Tensor) -> Tensor:
    with autocast(model):
        with pytest.raises(_Stop), model.blocks[1].register_forward_pre_hook(_stop):
            model(x)
        losses = []
        for part in (x, x * 0.5, x.flip(0)):
            losses.append(loss_of(model(part)))
            losses[-1].backward()
    return torch.stack(losses).sum().detach()


def with_a_part_in_float32(model: nn.Module, x: Tensor) -> Tensor:
    with autocast(model):
        first = model(x)
        assert torch.is_autocast_cache_enabled() is isinstance(model, ZeRO3), "as before the call"
        with autocast(model, enabled=False):
            second = model(x)
        loss = loss_of(first) + loss_of(second)
    loss.backward()
    return loss.detach()


def with_another_dtype(model: nn.Module, x: Tensor) -> Tensor:
    with autocast(model, dtype=torch.float16):
        loss = loss_of(model(x)) * 16
        loss.backward()
    with autocast(model):
        other = loss_of(model(x))
        other.backward()
    return loss.detach() + other.detach()


def with_gradients_in_the_forward(model: nn.Module, x: Tensor) -> Tensor:
    """A penalty on the input's gradient is computed between two forwards."""
    x = x.clone().requires_grad_()
    with autocast(model):
        (slope,) = torch.autograd.grad(loss_of(model(x)), x)
        loss = loss_of(model(x + slope.detach()))
    loss.backward()
    return loss.detach()


@on_ranks(2)
def test_autocasts_inside_each_other_are_bitwise_plain_torch() -> None:
    for run in (
        no_grad_pass_first,
        after_a_pass_that_fails,
        with_a_part_in_float32,
        with_another_dtype,
        with_gradients_in_the_forward,
    ):
        with named(run.__name__):
            assert_trains_alike(zero3(Mlp, Block), seeded(Mlp), mlp_batches(), run=run)
