"""Under torch.autocast a model trains as in plain torch, whatever passes share one autocast.

Inside a unit's call autocast keeps no casts (Note [A cast belongs to one call] in hooks.py). Where
a plain model uses a weight several times, it has the same bits with `cache_enabled=False`.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from layerzero import GradScaler, ZeRO3
from tests.harness.checks import assert_bitwise, assert_same_parameters, named
from tests.harness.compare import assert_trains_alike, zero3
from tests.harness.models import Block, Mlp, loss_of
from tests.harness.ranks import on_ranks
from tests.harness.reference import OPTIMIZERS, full_parameters, mlp_batches, seeded


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


def pairs(model: nn.Module, x: Tensor) -> Tensor:
    with autocast(model):
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
        with_a_part_in_float32,
        with_another_dtype,
        with_gradients_in_the_forward,
    ):
        with named(run.__name__):
            assert_trains_alike(zero3(Mlp, Block), seeded(Mlp), mlp_batches(), run=run)


def _train(model: nn.Module, scaler: torch.amp.GradScaler) -> list[Tensor]:
    optimizer = OPTIMIZERS["sgd_momentum"](model.parameters())
    losses = []
    for step in mlp_batches(4):
        optimizer.zero_grad()
        x = step[dist.get_rank()]
        with autocast(model, dtype=torch.float16):
            with torch.no_grad():
                target = model(x.flip(0))
            loss = loss_of(model(x) - target) + loss_of(model(x))
            if len(losses) == 2:
                loss = loss * 1e5  # overflows
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
    return losses


@on_ranks(2)
def test_autocast_with_a_scaler_is_bitwise_that_of_ddp() -> None:
    scalers = [GradScaler("cpu", init_scale=256.0), torch.amp.GradScaler("cpu", init_scale=256.0)]
    models = [zero3(Mlp, Block), DistributedDataParallel(seeded(Mlp))]
    for step, (loss, expected) in enumerate(zip(*map(_train, models, scalers), strict=True)):
        assert_bitwise(loss, expected, f"loss of step {step}")
    assert_same_parameters(*(full_parameters(model) for model in (models[0], models[1].module)))
    assert scalers[0].get_scale() == scalers[1].get_scale() == 128.0


class _Stop(Exception):
    pass


def _stop_in_the_middle(model: ZeRO3, x: Tensor) -> None:
    def stop(*_: object) -> None:
        raise _Stop

    with model.module.blocks[1].register_forward_pre_hook(stop):
        model(x)


@on_ranks(2)
def test_weights_summoned_and_passes_that_fail_inside_an_autocast() -> None:
    model, reference = zero3(Mlp, Block), seeded(Mlp)
    (x,) = [step[dist.get_rank()] for step in mlp_batches(1)]
    for each in (model, reference):
        with autocast(model):
            with torch.no_grad():
                each(x)
            full = each.summon_full_params() if isinstance(each, ZeRO3) else torch.no_grad()
            with full, torch.no_grad():
                each.head.weight.mul_(2.0)
                F.linear(x, each.stem.weight)
            torch.clear_autocast_cache()  # or the plain model goes on with the old weights
            loss = loss_of(each(x))
            loss.backward()
            if each is model:
                own = loss.detach()
    assert_bitwise(own, loss.detach())
    with pytest.raises(_Stop), autocast(model):
        _stop_in_the_middle(model, x)
    model.zero_grad()
    assert_trains_alike(model, reference, mlp_batches(), run=pairs)
