"""Gradients, and parameters after steps, are those of the same model unsharded."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from layerzero import ZeRO3
from tests.harness.checks import assert_bitwise, assert_same_on_all_ranks
from tests.harness.compare import (
    assert_same_gradients,
    assert_trains_alike,
    sharded,
    zero3,
)
from tests.harness.models import CASES, WIDTH, Block, Mlp
from tests.harness.ranks import run_ranks
from tests.harness.reference import (
    OPTIMIZERS,
    backward_of_all_ranks,
    batches_of,
    forward_backward,
    plain,
    seeded,
)


def _train(names: list[str], optimizer: str, steps: int = 3) -> None:
    world_size = dist.get_world_size()
    for name in names:
        case = CASES[name]
        try:
            assert_trains_alike(
                sharded(case),
                plain(case),
                batches_of(case, world_size, steps),
                optimizer,
            )
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


# What AdamW keeps of each element is below, with the models in which elements change places.
@pytest.mark.parametrize(
    "optimizer",
    [
        name if name != "adamw" else pytest.param(name, marks=pytest.mark.slow)
        for name in OPTIMIZERS
    ],
)
def test_two_ranks_train_bitwise_like_one_process(optimizer: str) -> None:
    run_ranks(2, _train, list(CASES), optimizer)


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_toy_model_trains_on_any_number_of_ranks(world_size: int) -> None:
    # Momentum of the first step is in the second.
    run_ranks(world_size, _train, list(CASES), "sgd_momentum", 2)


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(3, marks=pytest.mark.slow), 4])
def test_adamw_state_belongs_to_the_right_elements(world_size: int) -> None:
    names = ["transformer", "odd_shapes", "frozen_parts", "unused_parts"]
    run_ranks(world_size, _train, names, "adamw")


def _train_with(options: dict) -> None:
    case = CASES["mlp"]
    batches = batches_of(case, dist.get_world_size(), steps=3)
    assert_trains_alike(
        sharded(case, **options),
        seeded(case.build),
        batches,
        reduction=options.get("gradient_reduction", "mean"),
    )


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"gradient_reduction": "sum"}, id="sum"),
        pytest.param({"deterministic": True}, id="deterministic"),
        pytest.param({"reshard_after_forward": False}, id="kept after forward"),
        pytest.param({"auto_wrap_policy": None}, id="one unit"),
        pytest.param({"auto_wrap_policy": {torch.nn.Linear}}, id="a unit a layer"),
    ],
)
def test_options_do_not_change_the_gradient(options: dict, world_size: int) -> None:
    run_ranks(world_size, _train_with, options)


def _deterministic_sums() -> None:
    case = CASES["mlp"]
    model = sharded(case, deterministic=True)
    reference = seeded(case.build)
    batches = batches_of(case, dist.get_world_size(), steps=1)[0]
    forward_backward(model, batches[dist.get_rank()])
    backward_of_all_ranks(reference, batches)
    assert_same_gradients(model, reference)


def test_a_deterministic_sum_runs_in_rank_order() -> None:
    # Four ranks: dividing the sum by a power of two adds no rounding of its own.
    run_ranks(4, _deterministic_sums)


def _gradients_of_the_input() -> None:
    case = CASES["mlp"]
    model, reference = sharded(case), seeded(case.build)
    batch = batches_of(case, dist.get_world_size(), steps=1)[0][dist.get_rank()]
    own, expected = batch.clone().requires_grad_(), batch.clone().requires_grad_()
    forward_backward(model, own)
    forward_backward(reference, expected)
    assert own.grad is not None and expected.grad is not None
    assert_bitwise(own.grad, expected.grad, "gradient of the input")
    # The same through autograd.grad, which asks for no parameter's gradient.
    model.zero_grad()
    loss = model(own).square().sum()
    (gradient,) = torch.autograd.grad(loss, own)
    (expected_gradient,) = torch.autograd.grad(reference(expected).square().sum(), expected)
    assert_bitwise(gradient, expected_gradient, "gradient of the input")
    assert all(parameter.grad is None for parameter in model.parameters())
    batches = batches_of(case, dist.get_world_size(), steps=2)
    assert_trains_alike(model, reference, batches)


def test_inputs_get_their_gradient() -> None:
    run_ranks(2, _gradients_of_the_input)


def _shards_have_gradients_of_their_size() -> list[tuple[str, int]]:
    model = zero3(Mlp, Block)
    batch = batches_of(CASES["mlp"], dist.get_world_size(), steps=1)[0][dist.get_rank()]
    loss = forward_backward(model, batch)
    for name, parameter in model.named_parameters():
        assert parameter.dim() == 1, name
        assert parameter.grad is not None, name
        assert parameter.grad.shape == parameter.shape, name
        assert parameter.grad.dtype == parameter.dtype, name
    assert torch.isfinite(loss)
    names = [name for name, _ in model.named_parameters()]
    assert names == [name for name, _ in seeded(Mlp).named_parameters()]
    assert_same_on_all_ranks(names, "parameter names")
    return [(name, parameter.numel()) for name, parameter in model.named_parameters()]


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_rank_has_a_gradient_for_every_shard(world_size: int) -> None:
    sharded_params = run_ranks(world_size, _shards_have_gradients_of_their_size)
    full = {name: parameter.numel() for name, parameter in seeded(Mlp).named_parameters()}
    for name, numel in full.items():
        assert sum(dict(each)[name] for each in sharded_params) == numel


class Complex(nn.Module):
    """A complex parameter beside a real one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 3, dtype=torch.complex64))
        self.bias = nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.complex64) @ self.weight).abs() + self.bias


def _complex() -> None:
    torch.manual_seed(0)
    reference = Complex()
    model = ZeRO3(copy.deepcopy(reference))
    batches = [torch.randn(4, WIDTH) for _ in range(2)]
    model(batches[dist.get_rank()]).sum().backward()
    (sum(reference(batch).sum() for batch in batches) / 2).backward()
    with model.summon_full_params(with_grads=True):
        for full, plain in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.equal(full.grad, plain.grad)


def test_a_complex_parameter_has_the_gradient_of_the_reference() -> None:
    run_ranks(2, _complex)
