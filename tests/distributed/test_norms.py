"""Norms of whole parameters and gradients from shards, and gradients clipped by them."""

import math
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from layerzero import ZeRO3
from layerzero.optim import global_norm
from tests.harness.checks import (
    assert_bitwise,
    assert_norm,
    assert_same_on_all_ranks,
    assert_same_parameters,
)
from tests.harness.compare import assert_clips, assert_same_gradients, sharded, zero3
from tests.harness.models import CASES, Block, Case, Mlp
from tests.harness.ranks import on_ranks
from tests.harness.reference import (
    backward_of_all_ranks,
    batches_of,
    forward_backward,
    full_gradients,
    plain,
    seeded,
)


def _with_gradients(case: Case) -> tuple[ZeRO3, nn.Module]:
    model, reference = sharded(case), plain(case)
    step = batches_of(case, dist.get_world_size(), steps=1)[0]
    forward_backward(model, step[dist.get_rank()])
    backward_of_all_ranks(reference, step)
    assert_same_gradients(model, reference)
    return model, reference


def _assert_norm(own: Tensor, tensors: list[Tensor], norm_type: float, what: str) -> None:
    assert own.dim() == 0
    assert_norm(own, tensors, norm_type, what)
    assert_same_on_all_ranks(own, what)


def _norms_of(name: str, norm_types: tuple[float, ...]) -> None:
    model, reference = _with_gradients(CASES[name])
    before = full_gradients(model)
    sharded_params = list(model.parameters())
    own = {p: p.grad.clone() for p in sharded_params if p.grad is not None}
    full = [p.grad for p in reference.parameters() if p.grad is not None]
    assert len(own) == len(full), "also of shards without elements"
    for norm_type in norm_types:
        what = f"{name}, norm {norm_type}"
        values = global_norm(sharded_params, norm_type)
        _assert_norm(values, list(reference.parameters()), norm_type, what)
        for parameter, gradient in own.items():
            parameter.grad = gradient.clone()
        norm = global_norm([p.grad for p in own], norm_type)
        _assert_norm(norm, full, norm_type, what)
        assert_bitwise(norm, global_norm(model, norm_type), what)
        # torch has no infinity norm of an empty tensor.
        total = float(nn.utils.get_total_norm([each for each in full if each.numel()], norm_type))
        assert_bitwise(norm, model.clip_grad_norm_(2.0 * total, norm_type), what)
        assert_same_parameters(full_gradients(model), before, what=f"{what}: not clipped")
        assert_clips(model, 0.3 * total, norm_type)
    for sharded_param, parameter in zip(sharded_params, reference.parameters(), strict=True):
        if parameter.numel():
            _assert_norm(global_norm(sharded_param), [parameter], 2.0, name)
    moments = [torch.full_like(sharded_param, 2.0) for sharded_param in sharded_params]
    expected = [torch.full_like(p, 2.0) for p in reference.parameters()]
    _assert_norm(global_norm(moments, like=sharded_params), expected, 2.0, "moments")


@pytest.mark.parametrize("world_size", [1, 3])
@on_ranks()
def test_norms_are_those_of_whole_tensors(world_size: int) -> None:
    _norms_of("mlp", (2.0, 1.0, 3.0, 0.5, math.inf))
    for name in ("odd_shapes", "unused_parts", "frozen_parts", "tied_across_units", "mixed_dtypes"):
        _norms_of(name, (2.0, math.inf))


@on_ranks(2)
def test_norms_of_parts_and_of_several_models() -> None:
    plain = seeded(Mlp)
    model = zero3(Mlp, Block)
    blocks = model.blocks[1].parameters(), list(plain.blocks[1].parameters())
    _assert_norm(global_norm(blocks[0]), blocks[1], 2.0, "part")
    for norm_type in (2.0, math.inf):
        assert global_norm(model).item() == model.clip_grad_norm_(1.0, norm_type).item() == 0.0
    model.requires_grad_(False)
    assert model.clip_grad_norm_(1.0).item() == 0.0
    module = seeded(Mlp)
    model = ZeRO3(module, auto_wrap_policy={Block}, ignored_modules=[module.head])
    _assert_norm(global_norm(model.parameters()), list(plain.parameters()), 2.0, "with ignored")
    # Two models, in one norm, beside a module that is not sharded.
    other = zero3(Mlp)
    three = [*model.parameters(), *other.parameters(), *plain.parameters()]
    _assert_norm(global_norm(three), 3 * list(plain.parameters()), 2.0, "two models")
    _assert_norm(global_norm(plain.parameters()), list(plain.parameters()), 2.0, "unsharded")
    few = zero3(lambda: nn.Linear(1, 2, bias=False))  # The second rank has no element.
    few(torch.ones(1, 1)).sum().backward()
    assert_bitwise(few.clip_grad_norm_(100.0).float(), torch.tensor(2.0).sqrt(), "norm")


@on_ranks(2)
def test_what_has_no_norm_is_refused() -> None:
    model = zero3(Mlp, Block)
    sharded_params = list(model.parameters())
    for bad in (0.0, -1.0, math.nan):
        for take in (global_norm, lambda model, bad: model.clip_grad_norm_(1.0, bad)):
            with pytest.raises(ValueError, match="norm_type"):
                take(model, bad)
    with pytest.raises(ValueError, match="got none"):
        global_norm([])
    with pytest.raises(ValueError, match="like="):
        global_norm([torch.ones(3)])
    with pytest.raises(ValueError, match=r"zip\(\)"):
        global_norm([torch.ones(3)], like=sharded_params)
    with pytest.raises(ValueError, match=r"like this rank's shard of 'stem\.weight'"):
        global_norm([torch.ones(99)], like=sharded_params[:1])


@on_ranks(2)
def test_one_element_that_is_not_finite_shows_on_all_ranks() -> None:
    for value in (math.inf, math.nan):
        for norm_type in (2.0, math.inf):
            model, _ = _with_gradients(CASES["mlp"])
            if dist.get_rank() == 1:  # One element on one rank.
                next(each for each in model.parameters() if each.numel()).grad[0] = value
            norm = model.clip_grad_norm_(1.0, norm_type)
            assert math.isnan(norm.item()) if math.isnan(value) else math.isinf(norm.item())
            assert_same_on_all_ranks(torch.isfinite(norm).item(), "whether the norm is finite")


@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks()
def test_torchs_functions_give_the_norms_of_whole_tensors(world_size: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for norm_type in (2.0, 1.0, math.inf):
            _torchs_norm(norm_type)


def _torchs_norm(norm_type: float) -> None:
    model, other = (_with_gradients(CASES["mlp"])[0] for _ in range(2))
    gradients = [p.grad for p in model.parameters()]
    expected = other.clip_grad_norm_(0.1, norm_type)
    plain = nn.Linear(3, 3)
    plain(torch.ones(3)).sum().backward()
    own = nn.utils.clip_grad_norm_(plain.parameters(), 0.1, norm_type)
    assert torch.equal(own, torch.linalg.vector_norm(torch.ones(12), norm_type))
    assert torch.equal(nn.utils.get_total_norm(gradients, norm_type), expected)
    values = nn.utils.get_total_norm(model.parameters(), norm_type)
    assert torch.equal(values, global_norm(other.parameters(), norm_type))
    assert torch.equal(nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type), expected)
    for clipped, like in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(clipped.grad, like.grad)
    with torch.no_grad():
        gradients[0][:1] = torch.inf  # On ranks that have an element there.
    with pytest.raises(RuntimeError, match="over all ranks is inf"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type, error_if_nonfinite=True)
