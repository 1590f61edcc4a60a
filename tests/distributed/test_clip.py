"""clip_grad_norm_: the global norm, the same on every rank, and gradients scaled by it."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from layerzero import ZeRO3
from tests.harness.checks import assert_bitwise, assert_same_on_all_ranks, assert_same_parameters
from tests.harness.compare import assert_same_gradients, assert_same_values, sharded, zero3
from tests.harness.models import CASES, Block, Case, Mlp
from tests.harness.ranks import run_ranks
from tests.harness.reference import (
    OPTIMIZERS,
    backward_of_all_ranks,
    batches_of,
    forward_backward,
    full_gradients,
    seeded,
)

NORMS = (2.0, 1.0, 3.0, 0.5, math.inf)
_NAMES = ("mlp", "odd_shapes", "unused_parts", "frozen_parts", "tied_across_units")


def _with_gradients(case: Case) -> tuple[ZeRO3, nn.Module]:
    model, plain = sharded(case), seeded(case.build)
    step = batches_of(case, dist.get_world_size(), steps=1)[0]
    forward_backward(model, step[dist.get_rank()])
    backward_of_all_ranks(plain, step)
    return model, plain


def _clip(norm_type: float, names: tuple[str, ...]) -> None:
    for name in names:
        case = CASES[name]
        for share in (0.3, 2.0):  # below the norm, above it
            model, plain = _with_gradients(case)
            # torch has no infinity norm of an empty tensor.
            parameters = [parameter for parameter in plain.parameters() if parameter.numel()]
            gradients = [each.grad for each in parameters if each.grad is not None]
            limit = share * float(nn.utils.get_total_norm(gradients, norm_type))
            own = model.clip_grad_norm_(limit, norm_type)
            expected = nn.utils.clip_grad_norm_(parameters, limit, norm_type)
            assert own.dim() == 0
            # Sums of a few hundred powers, in another order and perhaps another dtype.
            torch.testing.assert_close(own.float(), expected.float(), rtol=1e-5, atol=0)
            assert_same_on_all_ranks(own, f"{name}: norm")
            assert_same_gradients(model, plain, 256, f"{name}: gradient of")


def _clip_by_each() -> None:
    for norm_type in NORMS:
        try:
            _clip(norm_type, _NAMES)
        except AssertionError as error:
            raise AssertionError(f"norm {norm_type}: {error}") from error


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_the_norm_is_that_of_the_whole_gradient(world_size: int) -> None:
    run_ranks(world_size, _clip_by_each)


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_gradients_of_several_dtypes_have_one_norm(norm_type: float) -> None:
    run_ranks(2, _clip, norm_type, ("mixed_dtypes",))


def _below_the_limit() -> None:
    model, _ = _with_gradients(CASES["mlp"])
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
    model, _ = _with_gradients(CASES["mlp"])
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
    model, plain = sharded(case), seeded(case.build)
    optimizers = [OPTIMIZERS[optimizer](each.parameters()) for each in (model, plain)]
    for step in batches_of(case, dist.get_world_size(), steps=4):
        for each in optimizers:
            each.zero_grad()
        forward_backward(model, step[dist.get_rank()])
        backward_of_all_ranks(plain, step)
        model.clip_grad_norm_(0.5)
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        for each in optimizers:
            each.step()
    assert_same_values(model, plain, roundings=256)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_clipped_training_follows_the_reference(optimizer: str) -> None:
    run_ranks(2, _training, optimizer)


def _after_no_sync() -> None:
    model, plain = zero3(Mlp, Block), seeded(Mlp)
    batches = batches_of(CASES["mlp"], 2 * dist.get_world_size(), steps=1)[0]
    step = [batches[2 * rank : 2 * rank + 2] for rank in range(dist.get_world_size())]
    own = step[dist.get_rank()]
    with model.no_sync():
        forward_backward(model, own[0])
    forward_backward(model, own[1])
    backward_of_all_ranks(plain, step, _both)
    norm, expected = model.clip_grad_norm_(0.1), nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
    assert_same_gradients(model, plain, roundings=64)


def _both(model: nn.Module, micro_batches: list[Tensor]) -> Tensor:
    return torch.stack([forward_backward(model, batch) for batch in micro_batches])


def test_the_norm_after_no_sync_is_that_of_the_sum() -> None:
    run_ranks(2, _after_no_sync)


def _bad_norm_type() -> None:
    model, _ = _with_gradients(CASES["mlp"])
    for norm_type in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="norm_type"):
            model.clip_grad_norm_(1.0, norm_type)


def test_a_norm_type_that_is_no_norm_is_refused() -> None:
    run_ranks(1, _bad_norm_type)
