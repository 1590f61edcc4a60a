"""Sizes that do not divide: parameters smaller than the group, ranks that own nothing, batches."""

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.harness.compare import assert_same_values, assert_trains_alike, zero3
from tests.harness.models import CASES, WIDTH, Block, Mlp
from tests.harness.ranks import run_ranks
from tests.harness.reference import (
    OPTIMIZERS,
    backward_of_all_ranks,
    batches_of,
    forward_backward,
    full_parameters,
    seeded,
)


class _Scalars(nn.Module):
    """Fewer elements than ranks, unit by unit."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.scales = nn.ModuleList(_Scale() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for scale in self.scales:
            x = torch.tanh(scale(x))
        return x


class _Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.25))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class _Widths(nn.Module):
    """Every remainder of a size by a group."""

    WIDTHS = (1, 2, 3, 4, 5, 7, 8, 13, 16, 17, 31)

    def __init__(self) -> None:
        super().__init__()
        sizes = (WIDTH, *self.WIDTHS)
        self.layers = nn.ModuleList(
            nn.Linear(left, right, bias=bool(right % 2)) for left, right in pairwise(sizes)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def _scalars(optimizer: str) -> None:
    batches = batches_of(CASES["mlp"], dist.get_world_size(), steps=3)
    for count in (1, 3):
        for units in ((_Scale,), ()):
            model = zero3(lambda count=count: _Scalars(count), *units)
            plain = seeded(lambda count=count: _Scalars(count))
            assert_trains_alike(model, plain, batches, optimizer)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_unit_may_have_fewer_elements_than_ranks(world_size: int, optimizer: str) -> None:
    run_ranks(world_size, _scalars, optimizer)


def _widths() -> None:
    batches = batches_of(CASES["mlp"], dist.get_world_size(), steps=3)
    for units in ((nn.Linear,), ()):
        assert_trains_alike(zero3(_Widths, *units), seeded(_Widths), batches, "adamw")


@pytest.mark.parametrize(
    "world_size", [*(pytest.param(size, marks=pytest.mark.slow) for size in (1, 2)), 3, 4]
)
def test_sizes_of_every_remainder_train(world_size: int) -> None:
    run_ranks(world_size, _widths)


def _optimizers_with_empty_shards() -> None:
    """Shards of no element are ordinary parameters to torch's optimizers."""
    kinds = {
        "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, nesterov=True, momentum=0.9),
        "Adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-2, eps=1e-4),
        "AdamW foreach": lambda parameters: torch.optim.AdamW(
            parameters, lr=1e-2, eps=1e-4, foreach=True
        ),
        "AdamW fused": lambda parameters: torch.optim.AdamW(
            parameters, lr=1e-2, eps=1e-4, fused=True
        ),
        "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2),
        "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3, eps=1e-4),
        "Adamax": lambda parameters: torch.optim.Adamax(parameters, lr=1e-2, eps=1e-4),
    }
    batches = batches_of(CASES["mlp"], dist.get_world_size(), steps=2)
    for name, kind in kinds.items():
        OPTIMIZERS[name] = kind  # in this rank's process only
        model = zero3(Mlp, Block)
        assert any(parameter.numel() == 0 for parameter in model.parameters())
        try:
            assert_trains_alike(model, seeded(Mlp), batches, name)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def test_element_wise_optimizers_take_shards_of_no_element() -> None:
    run_ranks(3, _optimizers_with_empty_shards)


def _batches_of_other_sizes() -> None:
    """The gradient is the mean of the ranks' gradients, whatever their batches' sizes."""
    generator = torch.Generator().manual_seed(0)
    world_size = dist.get_world_size()
    batches = [
        [
            torch.randn(1 + (rank + step) % 3, WIDTH, generator=generator)
            for rank in range(world_size)
        ]
        for step in range(3)
    ]
    assert_trains_alike(zero3(Mlp, Block), seeded(Mlp), batches)


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_may_have_batches_of_other_sizes(world_size: int) -> None:
    run_ranks(world_size, _batches_of_other_sizes)


def _empty_batch() -> None:
    """A rank with no rows takes part: its loss is an empty sum."""

    def run(model: nn.Module, batch: Tensor) -> Tensor:
        loss = model(batch).square().sum()
        loss.backward()
        return loss.detach()

    world_size = dist.get_world_size()
    full = batches_of(CASES["mlp"], world_size, steps=2)
    batches = [[step[0][:0], *step[1:]] for step in full]
    assert_trains_alike(zero3(Mlp, Block), seeded(Mlp), batches, run=run)


def test_a_rank_may_have_an_empty_batch() -> None:
    run_ranks(2, _empty_batch)


def _groups_by_name() -> None:
    """Parameter groups by name, as recipes for weight decay make them."""

    def groups(model: nn.Module) -> list[dict]:
        named = list(model.named_parameters())
        return [
            {"params": [p for name, p in named if name.endswith("weight")], "weight_decay": 0.5},
            {"params": [p for name, p in named if name.endswith("bias")], "lr": 0.01},
        ]

    model, plain = zero3(Mlp, Block), seeded(Mlp)
    optimizers = [torch.optim.SGD(groups(each), lr=0.1, momentum=0.9) for each in (model, plain)]
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 1, gamma=0.5) for each in optimizers]
    batch = batches_of(CASES["mlp"], 1, steps=1)[0][0]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        forward_backward(model, batch)
        backward_of_all_ranks(plain, [batch] * dist.get_world_size())
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
    assert_same_values(model, plain)
    assert full_parameters(model)


def test_parameter_groups_by_name_and_schedulers_work_on_shards() -> None:
    run_ranks(3, _groups_by_name)
