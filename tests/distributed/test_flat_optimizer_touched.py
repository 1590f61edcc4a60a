"""Whatever a program does to gradients and parameters between backward, clip and step counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from layerzero import ZeRO3
from layerzero.optim import AdamW
from tests.distributed.test_flat_optimizer import needs_fma
from tests.harness.checks import assert_bitwise
from tests.harness.compare import assert_norm_of_gradients, zero3
from tests.harness.models import Block, Mlp
from tests.harness.ranks import run_ranks
from tests.harness.reference import forward_backward

_HUGE = 1e30
"""A norm that clips nothing."""


def _trained(model: ZeRO3) -> list[Any]:
    return [each for each in model.parameters() if each.grad is not None]


def _assign(model: ZeRO3) -> None:
    for each in _trained(model):
        each.grad = each.grad * 2


def _assign_data(model: ZeRO3) -> None:
    for each in _trained(model):
        each.grad.data = each.grad.data * 3


def _assign_one(model: ZeRO3) -> None:
    model.head.weight.grad = model.head.weight.grad.clone() * 0.5


def _write(model: ZeRO3) -> None:
    with torch.no_grad():
        for each in _trained(model):
            each.grad.mul_(0.5)


def _write_data(model: ZeRO3) -> None:
    for each in _trained(model):
        each.grad.data.mul_(0.25)


def _underscore(model: ZeRO3) -> None:
    for each in _trained(model):
        each._grad = each._grad * 4


def _drop(model: ZeRO3) -> None:
    model.blocks[0].zero_grad()
    del model.stem.bias.grad


def _zeros(model: ZeRO3) -> None:
    model.head.zero_grad(set_to_none=False)


def _penalty(model: ZeRO3) -> None:
    sum(each.square().sum() for each in model.parameters()).backward()


def _penalty_alone(model: ZeRO3) -> None:
    model.zero_grad()
    _penalty(model)


def _clip_value(model: ZeRO3) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 1e-3)


def _clip_otherwise(model: ZeRO3) -> None:
    model.clip_grad_norm_(1e-2)


def _replace(model: ZeRO3) -> None:
    for each in model.parameters():
        each.data = each.data * 0.5


def _set(model: ZeRO3) -> None:
    with torch.no_grad():
        for each in model.parameters():
            each.set_(each.detach() * 0.75)


def _write_weights(model: ZeRO3) -> None:
    with torch.no_grad():
        for each in model.parameters():
            each.mul_(0.5)


def _vector(model: ZeRO3) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector * 0.5, model.parameters())


def _frozen(model: ZeRO3) -> None:
    model.head.requires_grad_(False)


def _unfrozen(model: ZeRO3) -> None:
    model.head.requires_grad_(True)
    _penalty(model)


def _summon(model: ZeRO3) -> None:
    with model.summon_full_params(with_grads=True):
        for each in model.parameters():
            if each.grad is not None:
                each.grad.mul_(2)


_held: dict[int, list[torch.Tensor]] = {}


def _hold(model: ZeRO3) -> None:
    _held[id(model)] = [each.grad for each in _trained(model)]


def _use_held(model: ZeRO3) -> None:
    """Gradients that were taken a step ago, and are still there if they add up."""
    for each in _held.pop(id(model)):
        each.data = each.data * 2


def _nothing(model: ZeRO3) -> None:
    """Between two that do something."""


_TOUCHES = (
    *(_assign, _nothing, _assign_data, _assign_data, _assign_one, _write, _nothing, _write_data),
    *(_underscore, _drop, _zeros, _penalty, _nothing, _penalty_alone, _clip_value),
    *(_clip_otherwise, _replace, _nothing, _set, _write_weights, _vector, _frozen, _nothing),
    *(_unfrozen, _penalty, _summon, _hold, _use_held, _nothing),
)


def _batch(step: int) -> torch.Tensor:
    seed = 10 * step + dist.get_rank()
    return torch.randn(2, 5, generator=torch.Generator().manual_seed(seed))


def _same(ours: nn.Module, theirs: nn.Module, what: str) -> None:
    pairs = zip(ours.named_parameters(), theirs.named_parameters(), strict=True)
    for (name, own), (_, other) in pairs:
        assert_bitwise(own.detach(), other.detach(), f"{what}: {name}")


def _touch_all(clips: bool, accumulates: bool) -> None:
    """Each way before the clip, and after it."""
    for late in (False, True):
        ours, theirs = zero3(Mlp, Block), zero3(Mlp, Block)
        optimizer = AdamW(ours.parameters(), lr=1e-2)
        other = torch.optim.AdamW(theirs.parameters(), lr=1e-2, fused=True)
        for step, touch in enumerate(_TOUCHES):
            what = f"{touch.__name__} late={late} clips={clips} accumulates={accumulates}"
            for model, own in ((ours, optimizer), (theirs, other)):
                forward_backward(model, _batch(step))
                if not late:
                    touch(model)
                if clips:
                    norm = (own if own is optimizer else model).clip_grad_norm_(_HUGE)
                    assert_norm_of_gradients(norm, model, what=f"{what}: norm")
                if late:
                    touch(model)
                own.step()
                if not accumulates or step % 3 == 2:
                    own.zero_grad()
            _same(ours, theirs, what)


def _touch(clips: bool) -> None:
    for accumulates in (False, True):
        _touch_all(clips, accumulates)


@needs_fma
@pytest.mark.parametrize(
    ("world_size", "clips"),
    [
        (2, True),
        pytest.param(2, False, marks=pytest.mark.slow),
        *(pytest.param(1, clips, marks=pytest.mark.soak) for clips in (False, True)),
    ],
)
def test_whatever_is_done_between_counts(world_size: int, clips: bool) -> None:
    run_ranks(world_size, _touch, clips)


def _train_verified() -> None:
    for make in (AdamW, torch.optim.AdamW):
        model = zero3(Mlp, Block, verify="always")
        optimizer = make(model.parameters(), lr=1e-2)
        for step in range(3):
            forward_backward(model, _batch(step))
            clips = optimizer if isinstance(optimizer, AdamW) else model
            clips.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        assert {type(each) for each in model.parameters()} == {nn.Parameter}


def test_parameters_keep_their_class() -> None:
    """torch's optimizers have no fast path for a subclass."""
    run_ranks(2, _train_verified)
