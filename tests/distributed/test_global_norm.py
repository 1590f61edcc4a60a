"""Norms and parameter groups of whole parameters, from shards."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import layerzero
from layerzero.optim import decay_groups, global_norm
from tests.harness.checks import assert_bitwise, assert_norm, assert_same_on_all_ranks
from tests.harness.compare import assert_same_values, sharded, zero3
from tests.harness.models import CASES, Block, Mlp
from tests.harness.ranks import run_ranks
from tests.harness.reference import (
    backward_of_all_ranks,
    batches_of,
    forward_backward,
    plain,
    seeded,
)

NORMS = (2.0, 1.0, math.inf)


def _assert_norm(own: Tensor, tensors: list[Tensor], norm_type: float, what: str) -> None:
    assert own.dim() == 0
    assert_norm(own, tensors, norm_type, what)
    assert_same_on_all_ranks(own, what)


def _of_everything() -> None:
    for name in ("mlp", "frozen_parts", "odd_shapes", "tied_across_units", "unused_parts"):
        case = CASES[name]
        model, reference = sharded(case), plain(case)
        step = batches_of(case, dist.get_world_size(), steps=1)[0]
        forward_backward(model, step[dist.get_rank()])
        backward_of_all_ranks(reference, step)
        for norm_type in NORMS:
            values = global_norm(model.parameters(), norm_type)
            _assert_norm(values, list(reference.parameters()), norm_type, f"{name}: values")
            gradients = [p.grad for p in reference.parameters() if p.grad is not None]
            own = [p.grad for p in model.parameters() if p.grad is not None]
            assert len(own) == len(gradients), "also of shards without elements"
            _assert_norm(global_norm(own, norm_type), gradients, norm_type, f"{name}: gradients")
            of_model = global_norm(model, norm_type)
            assert_bitwise(of_model, model.clip_grad_norm_(math.inf, norm_type), name)
            named = zip(model.named_parameters(), reference.named_parameters(), strict=True)
            for (fqn, sharded_param), (_, parameter) in named:
                if parameter.numel():
                    _assert_norm(global_norm(sharded_param, norm_type), [parameter], norm_type, fqn)
        moments = [torch.full_like(sharded_param, 2.0) for sharded_param in model.parameters()]
        own = global_norm(moments, like=model.parameters())
        _assert_norm(own, [torch.full_like(p, 2.0) for p in reference.parameters()], 2.0, name)


@pytest.mark.parametrize("world_size", [1, 3])
def test_norms_of_shards_are_those_of_whole_parameters(world_size: int) -> None:
    run_ranks(world_size, _of_everything)


def _of_parts() -> None:
    plain = seeded(Mlp)
    model = zero3(Mlp, Block, ignored_modules=[])
    _assert_norm(
        global_norm(model.blocks[1].parameters()), list(plain.blocks[1].parameters()), 2.0, "part"
    )
    plain = seeded(Mlp)
    module = seeded(Mlp)
    model = layerzero.ZeRO3(module, auto_wrap_policy={Block}, ignored_modules=[module.head])
    _assert_norm(global_norm(model.parameters()), list(plain.parameters()), 2.0, "with ignored")
    # Two models, in one norm, beside a module that is not sharded.
    other = zero3(Mlp)
    three = [*model.parameters(), *other.parameters(), *plain.parameters()]
    _assert_norm(global_norm(three), 3 * list(plain.parameters()), 2.0, "two models")
    _assert_norm(global_norm(plain.parameters()), list(plain.parameters()), 2.0, "unsharded")
    assert global_norm(model).item() == 0.0, "without gradients"


def test_norms_of_parts_and_of_several_models() -> None:
    run_ranks(2, _of_parts)


def _refused() -> None:
    model = zero3(Mlp, Block)
    sharded_params = list(model.parameters())
    for bad in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="norm_type"):
            global_norm(model, bad)
    with pytest.raises(ValueError, match="got none"):
        global_norm([])
    with pytest.raises(ValueError, match="like="):
        global_norm([torch.ones(3)])
    with pytest.raises(ValueError, match="one parameter in like= for each tensor"):
        global_norm([torch.ones(3)], like=sharded_params)
    with pytest.raises(ValueError, match=r"like this rank's shard of 'stem\.weight'"):
        global_norm([torch.ones(99)], like=sharded_params[:1])


def test_what_belongs_to_no_parameter_is_refused() -> None:
    run_ranks(2, _refused)


def _perturbed(model: nn.Module, norm: Tensor, sign: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(parameter.grad, alpha=sign * 0.05 / norm.item())


def _sharpness_aware() -> None:
    case = CASES["mlp"]
    model, plain = sharded(case), seeded(case.build)
    own, reference = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain))
    for step in batches_of(case, dist.get_world_size(), steps=3):
        forward_backward(model, step[dist.get_rank()])
        backward_of_all_ranks(plain, step)
        kept = [[p.detach().clone() for p in each.parameters()] for each in (model, plain)]
        norm = global_norm(model)
        _assert_norm(norm, [p.grad for p in plain.parameters()], 2.0, "gradients")
        for each in (model, plain):
            _perturbed(each, norm, 1.0)
        own.zero_grad()
        reference.zero_grad()
        forward_backward(model, step[dist.get_rank()])
        backward_of_all_ranks(plain, step)
        with torch.no_grad():
            for each, values in zip((model, plain), kept, strict=True):
                for parameter, value in zip(each.parameters(), values, strict=True):
                    parameter.copy_(value)
        own.step()
        reference.step()
        own.zero_grad()
        reference.zero_grad()
    assert_same_values(model, plain)


def test_sharpness_aware_steps_follow_the_reference() -> None:
    run_ranks(2, _sharpness_aware)


def _groups() -> None:
    for name in ("mlp", "odd_shapes", "tied_across_units", "frozen_parts"):
        case = CASES[name]
        model, plain = sharded(case), seeded(case.build)
        name_of = {id(p): n for each in (model, plain) for n, p in each.named_parameters()}
        own, expected = (decay_groups(each, 0.3) for each in (model, plain))
        assert [group["weight_decay"] for group in own] == [0.3, 0.0]
        listed = [[name_of[id(p)] for p in group["params"]] for group in own]
        assert listed == [[name_of[id(p)] for p in group["params"]] for group in expected]
        named = dict(plain.named_parameters())
        trainable = {n for n, p in named.items() if p.requires_grad}
        assert set(listed[0]) == {n for n in trainable if named[n].ndim >= 2}
        assert set(listed[1]) == trainable - set(listed[0])
        torch.optim.AdamW(own)
    model = zero3(Mlp, Block)
    by_name = {n: id(p) for n, p in model.named_parameters()}
    decayed = {
        id(p) for p in decay_groups(model, no_decay=["blocks.1", "stem.weight"])[0]["params"]
    }
    assert by_name["blocks.1.up.weight"] not in decayed and by_name["stem.weight"] not in decayed
    assert by_name["blocks.0.up.weight"] in decayed
    decayed = {id(p) for p in decay_groups(model, no_decay=[Block])[0]["params"]}
    assert decayed == {by_name["stem.weight"], by_name["head.weight"]}
    assert len(decay_groups(model, min_ndim=0)[1]["params"]) == 0
    with pytest.raises(ValueError, match=r"'stem\.wieght' matches no parameter"):
        decay_groups(model, no_decay=["stem.wieght"])
    with pytest.raises(TypeError, match="classes of modules"):
        decay_groups(model, no_decay=[torch.Tensor])


def test_decay_goes_by_the_original_shape() -> None:
    run_ranks(2, _groups)


def _scaler_without_a_device() -> None:
    scaler = layerzero.GradScaler(init_scale=4.0)
    assert scaler.is_enabled()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    assert scaler._device == ("cpu" if accelerator is None else accelerator.type)


def test_a_scaler_without_a_device_serves_the_one_at_hand() -> None:
    run_ranks(1, _scaler_without_a_device)
