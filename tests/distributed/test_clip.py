"""clip_grad_norm_: the global norm, the same on every rank, and gradients scaled by it."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from layerzero import ZeRO3
from tests.harness.checks import assert_bitwise, assert_same_on_all_ranks, assert_same_parameters
from tests.harness.compare import (
    assert_clips,
    assert_same_gradients,
    assert_same_values,
    follow,
    sharded,
    zero3,
)
from tests.harness.models import CASES, Block, Case, Mlp
from tests.harness.ranks import run_ranks
from tests.harness.reference import (
    OPTIMIZERS,
    backward_of_all_ranks,
    batches_of,
    forward_backward,
    full_gradients,
    plain,
    seeded,
)

NORMS = (2.0, 1.0, 3.0, 0.5, math.inf)
_NAMES = ("mlp", "odd_shapes", "unused_parts", "frozen_parts", "tied_across_units")


def _with_gradients(case: Case) -> ZeRO3:
    model, reference = sharded(case), plain(case)
    step = batches_of(case, dist.get_world_size(), steps=1)[0]
    forward_backward(model, step[dist.get_rank()])
    backward_of_all_ranks(reference, step)
    assert_same_gradients(model, reference)
    return model


def _clip(norm_type: float, names: tuple[str, ...]) -> None:
    for name in names:
        case = CASES[name]
        for share in (0.3, 2.0):  # below the norm, above it
            model = _with_gradients(case)
            # torch has no infinity norm of an empty tensor.
            found = full_gradients(model).values()
            gradients = [each for each in found if each is not None and each.numel()]
            limit = share * float(nn.utils.get_total_norm(gradients, norm_type))
            assert_same_on_all_ranks(assert_clips(model, limit, norm_type), f"{name}: norm")


def _clip_by_each() -> None:
    for norm_type in NORMS:
        try:
            _clip(norm_type, _NAMES)
        except AssertionError as error:
            raise AssertionError(f"norm {norm_type}: {error}") from error


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_norm_is_that_of_the_whole_gradient(world_size: int) -> None:
    run_ranks(world_size, _clip_by_each)


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_gradients_of_several_dtypes_have_one_norm(norm_type: float) -> None:
    run_ranks(2, _clip, norm_type, ("mixed_dtypes",))


def _below_the_limit() -> None:
    model = _with_gradients(CASES["mlp"])
    before = full_gradients(model)
    model.clip_grad_norm_(1e6)
    assert_same_parameters(full_gradients(model), before, what="gradient of")


def test_gradients_below_the_limit_do_not_change() -> None:
    run_ranks(2, _below_the_limit)


def _without_gradients() -> None:
    model = zero3(Mlp, Block)
    for norm_type in NORMS:
        assert model.clip_grad_norm_(1.0, norm_type).item() == 0.0
    model.requires_grad_(False)
    assert model.clip_grad_norm_(1.0).item() == 0.0


def test_without_gradients_the_norm_is_zero() -> None:
    run_ranks(2, _without_gradients)


def _not_finite(value: float, norm_type: float) -> None:
    model = _with_gradients(CASES["mlp"])
    if dist.get_rank() == 1:  # one element on one rank
        sharded_param = next(
            each for each in model.parameters() if each.grad is not None and each.numel()
        )
        sharded_param.grad[0] = value
    norm = model.clip_grad_norm_(1.0, norm_type)
    assert math.isnan(norm.item()) if math.isnan(value) else math.isinf(norm.item())
    assert_same_on_all_ranks(torch.isfinite(norm).item(), "whether the norm is finite")


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_an_infinity_on_one_rank_shows_in_the_norm_of_all(value: float, norm_type: float) -> None:
    run_ranks(2, _not_finite, value, norm_type)


def _few_elements() -> None:
    """Ranks that own nothing take part."""
    model = zero3(lambda: nn.Linear(1, 2, bias=False))
    model(torch.ones(1, 1)).sum().backward()
    assert_bitwise(model.clip_grad_norm_(100.0).float(), torch.tensor(2.0).sqrt(), "norm")


def test_ranks_without_an_element_take_part() -> None:
    run_ranks(4, _few_elements)


def _training(optimizer: str) -> None:
    case = CASES["transformer"]
    model, reference = sharded(case), plain(case)
    optimizers = [OPTIMIZERS[optimizer](each.parameters()) for each in (model, reference)]
    for step in batches_of(case, dist.get_world_size(), steps=4):
        for each in optimizers:
            each.zero_grad()
        forward_backward(model, step[dist.get_rank()])
        backward_of_all_ranks(reference, step)
        assert_same_gradients(model, reference)
        assert_clips(model, 0.5)
        follow(model, reference)
        for each in optimizers:
            each.step()
        assert_same_values(model, reference)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_clipped_training_follows_the_reference(optimizer: str) -> None:
    run_ranks(2, _training, optimizer)


def _after_no_sync() -> None:
    model, reference = zero3(Mlp, Block), seeded(Mlp)
    batches = batches_of(CASES["mlp"], 2 * dist.get_world_size(), steps=1)[0]
    step = [batches[2 * rank : 2 * rank + 2] for rank in range(dist.get_world_size())]
    own = step[dist.get_rank()]
    with model.no_sync():
        forward_backward(model, own[0])
    forward_backward(model, own[1])
    backward_of_all_ranks(reference, step, _both)
    assert_same_gradients(model, reference)
    assert_clips(model, 0.1)


def _both(model: nn.Module, micro_batches: list[Tensor]) -> Tensor:
    return torch.stack([forward_backward(model, batch) for batch in micro_batches])


def test_the_norm_after_no_sync_is_that_of_the_sum() -> None:
    run_ranks(2, _after_no_sync)


def _bad_norm_type() -> None:
    model = _with_gradients(CASES["mlp"])
    for norm_type in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="norm_type"):
            model.clip_grad_norm_(1.0, norm_type)


def test_a_norm_type_that_is_no_norm_is_refused() -> None:
    run_ranks(1, _bad_norm_type)
