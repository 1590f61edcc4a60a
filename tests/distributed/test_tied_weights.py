"""A tied parameter stays one parameter: one name, one gradient, which is the sum over its uses."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import layerzero
from layerzero import ZeRO3
from tests.harness.checks import assert_bitwise
from tests.harness.compare import assert_same_values, assert_trains_alike, sharded, zero3
from tests.harness.models import (
    CASES,
    WIDTH,
    Block,
    TiedAcrossUnits,
    TiedBlock,
    TiedInUnit,
    Transformer,
    TransformerBlock,
)
from tests.harness.ranks import run_ranks
from tests.harness.reference import batches_of, forward_backward, seeded

TIED = ["transformer", "tied_in_unit", "tied_across_units", "shared_module"]


def _tied_gradient_is_the_sum_over_uses() -> None:
    model = sharded(CASES["tied_in_unit"])
    untied = seeded(TiedInUnit)
    for block in untied.blocks:
        assert isinstance(block, TiedBlock)
        block.second.weight = nn.Parameter(block.first.weight.detach().clone())
    batch = batches_of(CASES["tied_in_unit"], 1, steps=1)[0][0]  # the same on every rank
    forward_backward(model, batch)
    forward_backward(untied, batch)
    with model.summon_full_params(writeback=False, with_grads=True):
        for own, block in zip(model.blocks, untied.blocks, strict=True):
            expected = block.first.weight.grad + block.second.weight.grad
            assert own.first.weight is own.second.weight
            assert_bitwise(own.first.weight.grad, expected, "gradient of a tied weight")


def test_a_tied_weight_gets_the_summed_gradient() -> None:
    run_ranks(2, _tied_gradient_is_the_sum_over_uses)


def _names(case_name: str) -> None:
    case = CASES[case_name]
    model, plain = sharded(case), seeded(case.build)
    for duplicates in (True, False):
        names = [name for name, _ in model.named_parameters(remove_duplicate=not duplicates)]
        expected = [name for name, _ in plain.named_parameters(remove_duplicate=not duplicates)]
        assert names == expected, f"remove_duplicate={not duplicates}"
    assert list(model.state_dict()) == list(plain.state_dict())
    assert len({id(parameter) for parameter in model.parameters()}) == len(list(plain.parameters()))


@pytest.mark.parametrize("name", TIED)
def test_a_tied_weight_has_the_names_of_the_plain_model(name: str) -> None:
    run_ranks(2, _names, name)


def _stays_tied_while_training(case_name: str) -> None:
    case = CASES[case_name]
    model, plain = sharded(case), seeded(case.build)
    pairs = _tied_names(plain)
    assert pairs
    for round_index in range(2):
        batches = batches_of(case, dist.get_world_size(), steps=2, seed=round_index)
        assert_trains_alike(model, plain, batches, optimizer="adamw")
        with model.summon_full_params():
            full = dict(model.named_parameters(remove_duplicate=False))
            assert all(full[first] is full[second] for first, second in pairs)
        own = dict(model.named_parameters(remove_duplicate=False))
        assert all(own[first] is own[second] for first, second in pairs)


def _tied_names(model: nn.Module) -> list[tuple[str, str]]:
    first: dict[nn.Parameter, str] = {}
    pairs = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter in first:
            pairs.append((first[parameter], name))
        first.setdefault(parameter, name)
    return pairs


@pytest.mark.parametrize("name", TIED)
def test_a_tied_weight_stays_tied(name: str) -> None:
    run_ranks(2, _stays_tied_while_training, name)


def _hoisted_to_the_nearest_common_unit() -> None:
    # Embedding and head are units of their own, so their shared weight is the root's.
    policy = {TransformerBlock, nn.Embedding, nn.Linear}
    model = ZeRO3(seeded(Transformer), auto_wrap_policy=policy)
    batches = batches_of(CASES["transformer"], dist.get_world_size(), steps=2)
    assert_trains_alike(model, seeded(Transformer), batches)
    # Two blocks of one stack share; the stack is a unit: it owns the weight, not the root.
    stacked = ZeRO3(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), seeded(TiedAcrossUnits)),
        auto_wrap_policy={Block, TiedAcrossUnits},
    )
    sizes = {unit.fqn: unit.num_parameters for unit in layerzero.units(stacked)}
    weight = 7 * WIDTH
    block = sum(parameter.numel() for parameter in Block().parameters())
    assert sizes["1"] == weight
    assert sizes["1.blocks.0"] == sizes["1.blocks.2"] == block - weight
    assert sizes["1.blocks.1"] == block
    assert sizes[""] == WIDTH * WIDTH + WIDTH


def test_a_weight_tied_across_units_belongs_to_the_nearest_unit_around_them() -> None:
    run_ranks(2, _hoisted_to_the_nearest_common_unit)


class _TiedStack(nn.Module):
    """Used by two wrapped modules and called through one alone at times."""

    def __init__(self) -> None:
        super().__init__()
        self.body = seeded(TiedAcrossUnits)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def _part_called_directly() -> None:
    model = ZeRO3(_TiedStack(), auto_wrap_policy={Block})
    plain = _TiedStack()
    batch = batches_of(CASES["mlp"], 1, steps=1)[0][0]

    def run_last_block(model: nn.Module, batch: Tensor) -> Tensor:
        loss = model.body.blocks[2](batch).square().sum()  # type: ignore[union-attr]
        loss.backward()
        return loss.detach()

    batches = [[batch] * dist.get_world_size()] * 2
    assert_trains_alike(model, plain, batches, run=run_last_block)
    assert_trains_alike(model, plain, batches)
    with model.summon_full_params(writeback=False), torch.no_grad():
        inside = model.body.blocks[2](batch)
    assert_bitwise(inside, model.body.blocks[2](batch), "called inside summon_full_params")


def test_a_unit_that_borrows_a_weight_can_be_called_directly() -> None:
    run_ranks(2, _part_called_directly)


def _tied_before_wrapping_one() -> str:
    first, second = Block(), Block()
    second.up.weight = first.up.weight
    model = nn.Sequential(ZeRO3(first), second)
    with pytest.raises(ValueError) as error:
        ZeRO3(model)
    return str(error.value)


def test_a_tie_to_a_module_that_is_wrapped_already_is_refused_with_both_names() -> None:
    for message in run_ranks(2, _tied_before_wrapping_one):
        assert "'1.up.weight'" in message
        assert "'0.up.weight'" in message or "'up.weight' of '0'" in message


def _frozen_and_tied() -> None:
    def build() -> nn.Module:
        model = TiedAcrossUnits()
        model.blocks[0].up.weight.requires_grad_(False)
        return model

    batches = batches_of(CASES["mlp"], dist.get_world_size(), steps=2)
    model, plain = zero3(build, Block), seeded(build)
    assert_trains_alike(model, plain, batches)
    for each in (model, plain):
        each.blocks[2].up.weight.requires_grad_(True)  # shown through either name
    assert_trains_alike(model, plain, batches)
    assert_same_values(model, plain)


def test_a_tied_weight_can_be_frozen_and_unfrozen_through_either_name() -> None:
    run_ranks(2, _frozen_and_tied)
