"""summon_full_params: the whole parameters for a while, with every option."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from layerzero import ZeRO3
from tests.harness.checks import assert_bitwise, assert_same_parameters, named
from tests.harness.compare import assert_same_values, assert_trains_alike, sharded, zero3
from tests.harness.models import CASES, WIDTH, Block, Mlp
from tests.harness.ranks import on_ranks
from tests.harness.reference import (
    backward_of_all_ranks,
    batches_of,
    forward_backward,
    full_gradients,
    plain,
    seeded,
)


@on_ranks(3)
def test_full_parameters_have_the_original_names_shapes_and_values() -> None:
    for name in (each for each in CASES if "_output" not in each):
        model, plain = sharded(CASES[name]), seeded(CASES[name].build)
        sharded_params = dict(model.named_parameters())
        with model.summon_full_params():
            full = dict(model.named_parameters())
            assert_same_parameters(full, dict(plain.named_parameters()), what=f"{name}: parameter")
            for key, parameter in full.items():
                assert isinstance(parameter, nn.Parameter), key
                assert parameter.requires_grad == plain.get_parameter(key).requires_grad, key
                assert model.get_parameter(key) is parameter, key
        after = dict(model.named_parameters())
        assert list(after) == list(sharded_params)
        assert all(after[key] is sharded_params[key] for key in sharded_params), name


@on_ranks(3)
def test_changes_are_written_back_or_not() -> None:
    for options in (
        {},
        {"writeback": False},
        {"rank0_only": True},
        {"rank0_only": True, "writeback": False},
        {"offload_to_cpu": True},
        {"rank0_only": True, "offload_to_cpu": True},
        {"rank0_only": True, "with_grads": True},
    ):
        model, plain = zero3(Mlp, Block), seeded(Mlp)
        shards = dict(model.named_parameters())
        with model.summon_full_params(**options), torch.no_grad():
            if not options.get("rank0_only") or dist.get_rank() == 0:
                for parameter in model.parameters():
                    parameter.mul_(2).add_(1)
                model.head.weight[0, 0] = 7
            else:
                assert all(p is shards[name] for name, p in model.named_parameters())
        if options.get("writeback", True):
            with torch.no_grad():
                for parameter in plain.parameters():
                    parameter.mul_(2).add_(1)
                plain.head.weight[0, 0] = 7
        with named(options):
            assert_trains_alike(model, plain, batches_of(CASES["mlp"], 3, steps=1))


@on_ranks(2)
def test_gradients_are_full_inside_and_written_back() -> None:
    for name in ("mlp", "unused_parts", "frozen_parts", "tied_across_units", "odd_shapes"):
        case = CASES[name]
        model, reference = sharded(case), plain(case)
        step = batches_of(case, dist.get_world_size(), steps=1)[0]
        forward_backward(model, step[dist.get_rank()])
        backward_of_all_ranks(reference, step)
        expected = full_gradients(reference)
        with model.summon_full_params(with_grads=True), torch.no_grad():
            gradients = {key: value.grad for key, value in model.named_parameters()}
            assert_same_parameters(gradients, expected, what=f"{name}: gradient of")
            for gradient in gradients.values():
                if gradient is not None:
                    gradient.mul_(3)
        tripled = {key: None if value is None else value * 3 for key, value in expected.items()}
        with model.summon_full_params():
            assert all(parameter.grad is None for parameter in model.parameters())
        after = full_gradients(model)
        assert_same_parameters(after, tripled, what=f"{name}: gradient of")
        with model.summon_full_params(with_grads=True, writeback=False):
            for parameter in model.parameters():
                parameter.grad = None
        assert_same_parameters(full_gradients(model), after, what=f"{name}: gradient of")


@on_ranks(2)
def test_a_nested_wrapper_summons_its_own_parameters_only() -> None:
    def build() -> nn.Module:
        model = Mlp()
        model.blocks[1] = ZeRO3(model.blocks[1])
        return model

    model, plain = zero3(build, Block), seeded(Mlp)
    inner = model.blocks[1]
    with inner.summon_full_params(), torch.no_grad():
        assert inner.up.weight.shape == (7, WIDTH)
        assert model.head.weight.dim() == 1 and model.blocks[0].up.weight.dim() == 1
        inner.up.weight.zero_()
    with torch.no_grad():
        plain.blocks[1].up.weight.zero_()
    assert_same_values(model, plain)


class _Stop(Exception):
    pass


@on_ranks(2)
def test_an_exception_inside_leaves_the_shards_in_place() -> None:
    model, plain = zero3(Mlp, Block), seeded(Mlp)
    sharded_params = dict(model.named_parameters())
    with pytest.raises(_Stop), model.summon_full_params():
        raise _Stop
    assert all(parameter is sharded_params[name] for name, parameter in model.named_parameters())
    assert_trains_alike(model, plain)


@on_ranks(2)
def test_a_forward_without_gradients_works_inside() -> None:
    model, plain = zero3(Mlp, Block), seeded(Mlp)
    batch = batches_of(CASES["mlp"], 1, steps=1)[0][0]
    with model.summon_full_params(), torch.no_grad():
        assert_bitwise(model(batch), plain(batch), "output")
        assert_bitwise(model.blocks[0](batch), plain.blocks[0](batch), "output of a block")
    assert_trains_alike(model, plain)


@on_ranks(2)
def test_inside_forward_backward_or_itself_it_is_refused() -> None:
    model = zero3(Mlp, Block)
    batch = batches_of(CASES["mlp"], 1, steps=1)[0][0]
    with model.summon_full_params():
        with (
            pytest.raises(RuntimeError, match=r"summon_full_params.*between steps"),
            model.summon_full_params(),
        ):
            pass
        assert model.head.weight.dim() == 2, "the outer one still holds"
    errors = []

    def in_forward(module: nn.Module, args: Any) -> None:
        try:
            with model.summon_full_params():
                pass
        except RuntimeError as error:
            errors.append(str(error))

    handle = model.blocks[0].up.register_forward_pre_hook(in_forward)
    model(batch)
    handle.remove()
    output = model(batch)
    output.register_hook(lambda gradient: in_forward(model, ()))
    output.sum().backward()
    assert len(errors) == 2, errors
    model.zero_grad()
    assert_trains_alike(model, seeded(Mlp))
