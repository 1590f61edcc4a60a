"""summon_full_params: the whole parameters for a while, with every option."""

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
    mlp_batches,
    plain,
    seeded,
)


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


@on_ranks(2)
def test_inside_forward_backward_or_itself_it_is_refused() -> None:
    model = zero3(Mlp, Block)
    batch = batches_of(CASES["mlp"], 1, steps=1)[0][0]
    refused = 0

    def summon(*_: object) -> None:
        nonlocal refused
        with pytest.raises(RuntimeError, match=r"summon_full_params.*between steps"):
            model.summon_full_params().__enter__()
        refused += 1

    with model.summon_full_params():
        summon()
        assert model.head.weight.dim() == 2, "the outer one still holds"
    handle = model.blocks[0].up.register_forward_pre_hook(summon)
    output = model(batch)
    handle.remove()
    output.register_hook(summon)
    output.sum().backward()
    assert refused == 3
    model.zero_grad()
    assert_trains_alike(model, seeded(Mlp))


@on_ranks(3)
def test_ranks_evaluate_unequally_where_all_parameters_are_full() -> None:
    plain, model = seeded(Mlp).eval(), zero3(Mlp, Block).eval()
    own = [torch.full((2, WIDTH), float(index)) for index in range(3 * dist.get_rank())]
    with model.summon_full_params(writeback=False), torch.no_grad():
        outputs = [model(batch) for batch in own]
        outputs += [block(batch) for batch in own for block in model.blocks]
    with torch.no_grad():
        expected = [plain(batch) for batch in own]
        expected += [block(batch) for batch in own for block in plain.blocks]
    for index, (output, other) in enumerate(zip(outputs, expected, strict=True)):
        assert_bitwise(output, other, f"output {index}")
    assert_trains_alike(model, plain, mlp_batches(1))
