"""Gradients, and parameters after steps, are those of the same model unsharded."""

from __future__ import annotations

import functools
from itertools import pairwise
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import layerzero
from layerzero import ZeRO3
from tests.harness.checks import assert_bitwise, named
from tests.harness.compare import (
    assert_same_gradients,
    assert_same_values,
    assert_trains_alike,
    sharded,
    trained_alike,
    zero3,
)
from tests.harness.models import (
    CASES,
    WIDTH,
    Block,
    Branches,
    Mlp,
    TiedAcrossUnits,
    TiedBlock,
    TiedInUnit,
    Transformer,
    TransformerBlock,
    UnusedParts,
    rows,
)
from tests.harness.ranks import on_ranks
from tests.harness.recording import full_nbytes
from tests.harness.reference import (
    OPTIMIZERS,
    backward_of_all_ranks,
    batches_of,
    forward_backward,
    full_gradients,
    full_parameters,
    plain,
    seeded,
)

MOVED = ["transformer", "odd_shapes", "frozen_parts", "unused_parts"]
"""In these elements change places, and with them what AdamW keeps of each."""


@pytest.mark.parametrize(
    ("world_size", "optimizer"),
    [*((size, "sgd_momentum") for size in (1, 2, 3)), *((size, "adamw") for size in (1, 2, 4))],
)
@on_ranks()
def test_every_toy_model_trains_bitwise_like_one_process(world_size: int, optimizer: str) -> None:
    """What a structure of outputs needs does not ask how many ranks there are: all once."""
    names = CASES if world_size == 2 else [name for name in CASES if "_output" not in name]
    for name in names if optimizer == "sgd_momentum" else MOVED:
        case = CASES[name]
        # Momentum of the first step is in the second.
        batches = batches_of(case, world_size, steps=2)
        with named(name):
            assert_trains_alike(sharded(case), plain(case), batches, optimizer)


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
@on_ranks(3)
def test_options_do_not_change_the_gradient(options: dict) -> None:
    case = CASES["mlp"]
    batches = batches_of(case, dist.get_world_size(), steps=2)
    reduction = options.get("gradient_reduction", "mean")
    assert_trains_alike(sharded(case, **options), seeded(case.build), batches, reduction=reduction)


@on_ranks(2)
def test_inputs_get_their_gradient() -> None:
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


@on_ranks(3)
def test_every_rank_has_a_gradient_for_every_shard() -> None:
    model, full = zero3(Mlp, Block), seeded(Mlp)
    batch = batches_of(CASES["mlp"], dist.get_world_size(), steps=1)[0][dist.get_rank()]
    assert torch.isfinite(forward_backward(model, batch))
    pairs = zip(model.named_parameters(), full.named_parameters(), strict=True)
    for (name, parameter), (expected, whole) in pairs:
        assert name == expected
        assert parameter.dim() == 1, name
        assert parameter.grad is not None, name
        assert parameter.grad.shape == parameter.shape, name
        assert parameter.grad.dtype == parameter.dtype, name
        numel = torch.tensor(parameter.numel())
        dist.all_reduce(numel)
        assert numel == whole.numel(), name


class Complex(nn.Module):
    """A complex parameter beside a real one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 3, dtype=torch.complex64))
        self.bias = nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.complex64) @ self.weight).abs() + self.bias


@on_ranks(2)
def test_a_complex_parameter_has_the_gradient_of_the_reference() -> None:
    trained_alike(Complex)


@on_ranks(2)
def test_a_parameter_unused_on_every_rank_keeps_no_gradient_and_its_value() -> None:
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


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@on_ranks(3)
def test_a_parameter_unused_on_one_rank_counts_as_zero_there(optimizer: str) -> None:
    generator = torch.Generator().manual_seed(0)
    world_size = dist.get_world_size()
    # On one rank, on another, on none, on all, on one again.
    used = [{0}, {world_size - 1}, set(), set(range(world_size)), {0}]
    batches = [[(rows(generator), rank in ranks) for rank in range(world_size)] for ranks in used]
    for build, unit in ((_Optional, Block), (_OptionalBlocks, _OptionalBlock)):
        model = zero3(build, unit)
        assert_trains_alike(model, seeded(build), batches, optimizer)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@on_ranks(2)
def test_each_step_may_take_another_path_through_the_units(optimizer: str) -> None:
    generator = torch.Generator().manual_seed(0)
    paths = [[0, 1, 2, 3], [3], [1, 2], [], [2, 1], [0, 1, 2, 3], [3, 3, 0]]
    world_size = dist.get_world_size()
    batches = [[(rows(generator), path) for _ in range(world_size)] for path in paths]
    model = zero3(Branches, Block)
    assert_trains_alike(model, seeded(Branches), batches, optimizer)


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


@on_ranks(2)
def test_outputs_may_be_left_out_of_the_loss() -> None:
    model, plain = zero3(_Outputs, Block), seeded(_Outputs)
    for seed, name in enumerate([*_LOSSES, "both", "left"]):
        run = functools.partial(_run_with_loss, name)
        batches = batches_of(CASES["mlp"], dist.get_world_size(), steps=2, seed=seed)
        assert_trains_alike(model, plain, batches, run=run)


@on_ranks(2)
def test_a_forward_without_a_backward_does_not_disturb_the_next_step() -> None:
    """A forward whose outputs never meet a loss leaves nothing behind."""
    model, plain = sharded(CASES["mlp"]), seeded(CASES["mlp"].build)
    batches = batches_of(CASES["mlp"], dist.get_world_size(), steps=2)
    model(batches[0][dist.get_rank()])
    output = model(batches[0][dist.get_rank()])
    del output
    assert_trains_alike(model, plain, batches[1:])


@on_ranks(2)
def test_a_gradient_stays_where_the_next_micro_batch_brings_none() -> None:
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


# Sizes that do not divide: parameters smaller than the group, ranks that own nothing, batches -----


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


@pytest.mark.parametrize(("world_size", "optimizer"), zip((2, 4), OPTIMIZERS, strict=True))
@on_ranks()
def test_a_unit_may_have_fewer_elements_than_ranks(world_size: int, optimizer: str) -> None:
    batches = batches_of(CASES["mlp"], dist.get_world_size(), steps=2)
    for count in (1, 3):
        for units in ((_Scale,), ()):
            model = zero3(lambda count=count: _Scalars(count), *units)
            plain = seeded(lambda count=count: _Scalars(count))
            assert_trains_alike(model, plain, batches, optimizer)


@pytest.mark.parametrize("world_size", [3, 4])
@on_ranks()
def test_sizes_of_every_remainder_train(world_size: int) -> None:
    batches = batches_of(CASES["mlp"], dist.get_world_size(), steps=2)
    for units in ((nn.Linear,), ()):
        assert_trains_alike(zero3(_Widths, *units), seeded(_Widths), batches, "adamw")


@on_ranks(3)
def test_element_wise_optimizers_take_shards_of_no_element() -> None:
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
        model = zero3(Mlp, Block)
        assert any(parameter.numel() == 0 for parameter in model.parameters())
        with named(name), mock.patch.dict(OPTIMIZERS, {name: kind}):
            assert_trains_alike(model, seeded(Mlp), batches, name)


@on_ranks(3)
def test_ranks_may_have_batches_of_other_sizes() -> None:
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


@on_ranks(2)
def test_a_rank_may_have_an_empty_batch() -> None:
    """A rank with no rows takes part: its loss is an empty sum."""

    def run(model: nn.Module, batch: Tensor) -> Tensor:
        loss = model(batch).square().sum()
        loss.backward()
        return loss.detach()

    world_size = dist.get_world_size()
    full = batches_of(CASES["mlp"], world_size, steps=2)
    batches = [[step[0][:0], *step[1:]] for step in full]
    assert_trains_alike(zero3(Mlp, Block), seeded(Mlp), batches, run=run)


@on_ranks(3)
def test_parameter_groups_by_name_and_schedulers_work_on_shards() -> None:
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


# A tied parameter stays one parameter: one name, one gradient, which is the sum over its uses -----


TIED = ["transformer", "tied_in_unit", "tied_across_units", "shared_module"]


@on_ranks(2)
def test_a_tied_weight_gets_the_summed_gradient() -> None:
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


@pytest.mark.parametrize("case_name", TIED)
@on_ranks(2)
def test_a_tied_weight_has_the_names_of_the_plain_model_and_stays_tied(case_name: str) -> None:
    case = CASES[case_name]
    model, plain = sharded(case), seeded(case.build)
    for duplicates in (True, False):
        names = [name for name, _ in model.named_parameters(remove_duplicate=not duplicates)]
        expected = [name for name, _ in plain.named_parameters(remove_duplicate=not duplicates)]
        assert names == expected, f"remove_duplicate={not duplicates}"
    assert list(model.state_dict()) == list(plain.state_dict())
    assert len({id(parameter) for parameter in model.parameters()}) == len(list(plain.parameters()))
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


@on_ranks(2)
def test_a_weight_tied_across_units_belongs_to_the_nearest_unit_around_them() -> None:
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


class _TiedStack(nn.Module):
    """Used by two wrapped modules and called through one alone at times."""

    def __init__(self) -> None:
        super().__init__()
        self.body = seeded(TiedAcrossUnits)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


@on_ranks(2)
def test_a_unit_that_borrows_a_weight_can_be_called_directly() -> None:
    model = ZeRO3(_TiedStack(), auto_wrap_policy={Block})
    plain = _TiedStack()
    batch = batches_of(CASES["mlp"], 1, steps=1)[0][0]

    def run_last_block(model: nn.Module, batch: Tensor) -> Tensor:
        loss = model.body.blocks[2](batch).square().sum()
        loss.backward()
        return loss.detach()

    batches = [[batch] * dist.get_world_size()] * 2
    assert_trains_alike(model, plain, batches, run=run_last_block)
    assert_trains_alike(model, plain, batches)
    with model.summon_full_params(writeback=False), torch.no_grad():
        inside = model.body.blocks[2](batch)
    assert_bitwise(inside, model.body.blocks[2](batch), "called inside summon_full_params")


@on_ranks(2)
def test_a_tie_to_a_module_that_is_wrapped_already_is_refused_with_both_names() -> None:
    first, second = Block(), Block()
    second.up.weight = first.up.weight
    model = nn.Sequential(ZeRO3(first), second)
    names = r"(?s)(?=.*'1\.up\.weight')(?=.*('0\.up\.weight'|'up\.weight' of '0'))"
    with pytest.raises(ValueError, match=names):
        ZeRO3(model)


@on_ranks(2)
def test_a_tied_weight_can_be_frozen_and_unfrozen_through_either_name() -> None:
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


def penalised(model: nn.Module, x: torch.Tensor, other_first: bool) -> torch.Tensor:
    """A loss with a gradient penalty, as a WGAN has it."""
    x = x.clone().requires_grad_()
    loss = model(x.detach()).square().mean() if other_first else 0.0
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    penalty = (gradient.norm(dim=1) - 1).square().mean()
    return loss + penalty + (0.0 if other_first else model(x.detach()).square().mean())


@pytest.mark.parametrize("other_first", [True, False])
@on_ranks(2)
def test_a_gradient_penalty_trains_as_without_sharding(other_first: bool) -> None:
    def run(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        loss = penalised(model, batch, other_first)
        loss.backward()
        if isinstance(model, ZeRO3):
            assert set(full_nbytes(model).values()) == {0}
        return loss.detach()

    trained_alike(Mlp, Block, run=run)


@on_ranks(2)
def test_parameters_that_stay_full_for_a_second_backward_are_never_stale() -> None:
    torch.manual_seed(0)
    model = ZeRO3(Mlp(), auto_wrap_policy={Block})
    x = torch.randn(4, WIDTH, requires_grad=True)
    before = model(x)
    torch.autograd.grad(before.sum(), x, create_graph=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data.mul_(0.5)  # unseen by version counters
    torch.manual_seed(0)
    plain = Mlp()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(0.5)
    assert torch.equal(model(x), plain(x))
