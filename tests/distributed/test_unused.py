"""Parameters without a gradient: on no rank, on some, in one step and not the next."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.harness.checks import assert_bitwise
from tests.harness.compare import assert_same_gradients, assert_trains_alike, sharded, zero3
from tests.harness.models import CASES, WIDTH, Block, Branches, UnusedParts, rows
from tests.harness.ranks import run_ranks
from tests.harness.reference import (
    OPTIMIZERS,
    backward_of_all_ranks,
    batches_of,
    forward_backward,
    full_gradients,
    full_parameters,
    seeded,
)


def _unused_everywhere() -> None:
    model, plain = sharded(CASES["unused_parts"]), seeded(UnusedParts)
    before = full_parameters(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    step = batches_of(CASES["unused_parts"], dist.get_world_size(), steps=1)[0]
    model(step[dist.get_rank()]).square().sum().backward()
    optimizer.step()
    after, gradients = full_parameters(model), full_gradients(model)
    prefixes = ("unused.", "half_used.never.", "lost.")
    for name, _ in plain.named_parameters():
        is_unused = name.startswith(prefixes)
        assert (gradients[name] is None) == is_unused, name
        # Weight decay must not touch it: an optimizer skips what has no gradient.
        assert torch.equal(before[name], after[name]) == is_unused, name


def test_a_parameter_unused_on_every_rank_keeps_no_gradient_and_its_value() -> None:
    run_ranks(2, _unused_everywhere)


class _Optional(nn.Module):
    """The batch says whether the second layer of each block runs: (x, flag)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.extra = nn.Linear(WIDTH, WIDTH)

    def forward(self, batch: tuple[Tensor, bool]) -> Tensor:
        x, flag = batch
        for block in self.blocks:
            x = block(x)
        return self.extra(x) if flag else x


class _OptionalBlock(nn.Module):
    """Always called, but its second layer works only where the batch says so."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(WIDTH, WIDTH)
        self.sometimes = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, flag: bool) -> Tensor:
        x = torch.tanh(self.always(x))
        return self.sometimes(x) if flag else x


class _OptionalBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_OptionalBlock() for _ in range(3))

    def forward(self, batch: tuple[Tensor, bool]) -> Tensor:
        x, flag = batch
        for block in self.blocks:
            x = block(x, flag)
        return x


def _used_on_some_ranks(optimizer: str) -> None:
    generator = torch.Generator().manual_seed(0)
    world_size = dist.get_world_size()
    # On one rank, on another, on none, on all, on one again.
    used = [{0}, {world_size - 1}, set(), set(range(world_size)), {0}]
    batches = [[(rows(generator), rank in ranks) for rank in range(world_size)] for ranks in used]
    for build, unit in ((_Optional, Block), (_OptionalBlocks, _OptionalBlock)):
        model = zero3(build, unit)
        assert_trains_alike(model, seeded(build), batches, optimizer)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_parameter_unused_on_one_rank_counts_as_zero_there(
    world_size: int, optimizer: str
) -> None:
    run_ranks(world_size, _used_on_some_ranks, optimizer)


def _other_units_every_step(optimizer: str) -> None:
    generator = torch.Generator().manual_seed(0)
    paths = [[0, 1, 2, 3], [3], [1, 2], [], [2, 1], [0, 1, 2, 3], [3, 3, 0]]
    world_size = dist.get_world_size()
    batches = [[(rows(generator), path) for _ in range(world_size)] for path in paths]
    model = zero3(Branches, Block)
    assert_trains_alike(model, seeded(Branches), batches, optimizer)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_each_step_may_take_another_path_through_the_units(optimizer: str) -> None:
    run_ranks(2, _other_units_every_step, optimizer)


class _Outputs(nn.Module):
    """Two heads; the caller chooses whose output enters the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = Block()
        self.left = Block()
        self.right = Block()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.trunk(x)
        return self.left(x), self.right(x)


_LOSSES = {
    "left": lambda left, right: left.square().sum(),
    "right": lambda left, right: right.square().sum(),
    "both": lambda left, right: (left * right).sum(),
    "part of one": lambda left, right: left[0].sum(),
    "neither reaches the heads": lambda left, right: (left - left.detach()).sum() * 0.0,
}


def _run_with_loss(name: str, model: nn.Module, batch: Tensor) -> Tensor:
    loss = _LOSSES[name](*model(batch))
    loss.backward()
    return loss.detach()


def _outputs_not_in_the_loss() -> None:
    model, plain = zero3(_Outputs, Block), seeded(_Outputs)
    for seed, name in enumerate([*_LOSSES, "both", "left"]):
        run = functools.partial(_run_with_loss, name)
        batches = batches_of(CASES["mlp"], dist.get_world_size(), steps=2, seed=seed)
        assert_trains_alike(model, plain, batches, run=run)


def test_outputs_may_be_left_out_of_the_loss() -> None:
    run_ranks(2, _outputs_not_in_the_loss)


def _loss_without_the_model() -> None:
    """A forward whose outputs never meet a loss leaves nothing behind."""
    model, plain = sharded(CASES["mlp"]), seeded(CASES["mlp"].build)
    batches = batches_of(CASES["mlp"], dist.get_world_size(), steps=3)
    model(batches[0][dist.get_rank()])
    output = model(batches[0][dist.get_rank()])
    del output
    assert_trains_alike(model, plain, batches[1:])


def test_a_forward_without_a_backward_does_not_disturb_the_next_step() -> None:
    run_ranks(2, _loss_without_the_model)


def _accumulates_where_unused() -> None:
    """A gradient that is there stays where the next micro-batch brings none."""
    model = zero3(_OptionalBlocks, _OptionalBlock)
    plain = seeded(_OptionalBlocks)
    generator = torch.Generator().manual_seed(0)
    world_size, rank = dist.get_world_size(), dist.get_rank()
    for flags in ((True, True), (False, False), (True, False)):
        step = [(rows(generator), flags[each % 2]) for each in range(world_size)]
        loss = forward_backward(model, step[rank])
        assert_bitwise(loss, backward_of_all_ranks(plain, step)[rank], "loss")
        assert_same_gradients(model, plain)


def test_a_gradient_stays_where_the_next_micro_batch_brings_none() -> None:
    run_ranks(2, _accumulates_where_unused)
