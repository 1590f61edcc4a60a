"""Uses that broke once: each test is the program that showed it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from types import MappingProxyType

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from layerzero import CollectiveError, MixedPrecision, ZeRO3, units
from tests.harness.checks import assert_bitwise
from tests.harness.compare import assert_same_gradients, assert_trains_alike, zero3
from tests.harness.internals import inner_units
from tests.harness.models import CASES, WIDTH, Block, Mlp
from tests.harness.ranks import run_ranks
from tests.harness.recording import recorded_operations
from tests.harness.reference import (
    Terms,
    backward_of_all_ranks,
    batches_of,
    forward_backward,
    full_gradients,
    seeded,
)


def wrapped(build: type[nn.Module] = Mlp, **options) -> ZeRO3:
    torch.manual_seed(0)
    options.setdefault("auto_wrap_policy", {Block})
    return ZeRO3(build(), timeout=timedelta(seconds=15), **options)


def batch(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * seed + dist.get_rank())
    return torch.randn(3, WIDTH, generator=generator)


def _dies_between_steps() -> str | None:
    model = wrapped()
    model(batch()).sum().backward()
    if dist.get_rank() == 1:
        os._exit(5)
    time.sleep(0.5)  # the connection is known to be closed before anything is issued
    with pytest.raises(CollectiveError) as caught:
        model(batch())
    with pytest.raises(CollectiveError, match="restart the ranks"):
        model(batch())
    return str(caught.value)


def test_a_rank_that_died_between_steps_is_named() -> None:
    message = run_ranks(2, _dies_between_steps, expect_exit={1: 5})[0]
    assert "the root unit" in message
    assert "rank 0 got no answer from rank 1" in message


def _holds_a_graph() -> None:
    model = wrapped()
    kept = model(batch(9)).sum() if dist.get_rank() == 0 else model(batch(9)).sum().detach()
    orders = []
    for step in range(3):
        with recorded_operations(model) as operations:
            model(batch(step)).sum().backward()
        orders.append([operation[:2] for operation in operations])
    assert kept.numel() == 1
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, orders)
    assert everyone[0] == everyone[1]
    assert orders[1] == orders[2], "an old graph stands in the way of one backward at the most"


def test_a_graph_that_one_rank_still_holds_changes_no_order() -> None:
    run_ranks(2, _holds_a_graph)


class ForceField(nn.Module):
    """Differentiates its own energy inside its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        energy = self.stem(x)
        for block in self.blocks:
            energy = block(energy)
        (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return energy.sum() + force.square().sum()


def batches(seed: int) -> list[torch.Tensor]:
    """What `batch` gives on each rank."""
    generators = [
        torch.Generator().manual_seed(10 * seed + r) for r in range(dist.get_world_size())
    ]
    return [torch.randn(3, WIDTH, generator=each) for each in generators]


def _forces() -> None:
    def run(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        loss = model(batch)
        loss.backward()
        return loss.detach()

    model = wrapped(ForceField)
    torch.manual_seed(0)
    plain = ForceField()
    for step in range(3):
        model.zero_grad()
        plain.zero_grad()
        losses = backward_of_all_ranks(plain, batches(step), run)
        assert_bitwise(run(model, batch(step)), losses[dist.get_rank()], "loss")
        assert_same_gradients(model, plain)


def test_gradients_inside_a_forward_train_a_force_field() -> None:
    run_ranks(2, _forces)


class Mixed(nn.Module):
    """One unit plain, and recomputed by a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.second, x, use_reentrant=True)
        return self.second(self.first(x))


def _mixed() -> None:
    model = wrapped(Mixed)
    torch.manual_seed(0)
    plain = Mixed()

    def run(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        loss = sum(model(x.requires_grad_()).sum() for x in inputs)
        loss.backward()
        return loss.detach()

    # The recomputations are backward passes of their own, and each is reduced on its own.
    terms = Terms()
    backward_of_all_ranks(plain, list(zip(batches(1), batches(2), strict=True)), run, terms=terms)
    run(model, (batch(1), batch(2)))
    assert_same_gradients(model, plain, terms)


def test_a_unit_called_plain_and_recomputed_in_two_forwards_of_one_backward() -> None:
    run_ranks(2, _mixed)


def _no_gradient_from_first() -> None:
    model = wrapped()
    model(batch()).sum().backward()
    with model.summon_full_params(rank0_only=True, with_grads=True):
        if dist.get_rank() == 0:
            model.module.stem.weight.grad = None
            model.module.stem.bias.grad.fill_(2.0)
    sharded_params = dict(model.named_parameters())
    assert sharded_params["stem.weight"].grad is None
    assert torch.all(sharded_params["stem.bias"].grad == 2.0)
    assert full_gradients(model)["head.weight"] is not None


def test_a_gradient_that_rank_0_removed_is_removed_everywhere() -> None:
    run_ranks(2, _no_gradient_from_first)


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(self.stem(x))


class Stages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.stages = nn.Sequential(Stage(), Stage())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.stages(self.stem(x))


def _nested() -> None:
    model = wrapped(Stages, auto_wrap_policy={Stage, Block})
    ahead: dict[str, list[str]] = {}
    for unit in inner_units(model):

        def note(*_: object, unit=unit) -> None:
            ahead[unit.fqn] = [u.fqn for u in units(model) if u.state.name == "GATHERING"]

        unit.module.register_forward_pre_hook(note)
    with torch.no_grad():
        for _ in range(2):
            model(batch())
    assert ahead["stages.0"] == ["stages.0.blocks.0"]
    assert ahead["stages.0.blocks.1"] == ["stages.0.blocks.2"]
    assert ahead["stages.0.blocks.2"] == ["stages.1"]


def test_units_inside_units_inside_units_are_prefetched_too() -> None:
    run_ranks(2, _nested)


class Explodes(nn.LayerNorm):
    explode = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.explode:
            raise ValueError("told to")
        return super().forward(x)


def _norm_fails() -> None:
    norm = Explodes(WIDTH)
    model = ZeRO3(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), norm, nn.Linear(WIDTH, 2)),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, keep_float32=(Explodes,)),
    )
    norm.explode = True
    with pytest.raises(ValueError, match="told to"):
        model(batch())
    norm.explode = False
    for _ in range(2):  # a leftover of the failed call would be taken for this one's
        assert model(batch()).dtype == torch.bfloat16


def test_a_float32_norm_that_raised_keeps_nothing() -> None:
    run_ranks(2, _norm_fails)


def _norm_alone() -> None:
    model = ZeRO3(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)),
        auto_wrap_policy={nn.LayerNorm},
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, keep_float32=(nn.LayerNorm,)),
    )
    seen = []
    model.module[1].register_forward_hook(lambda _, args, __: seen.append(args[0].dtype))
    model.module[1](batch())
    assert seen == [torch.float32], "its input is not rounded on the way in"


def test_a_unit_that_stays_float32_gets_its_input_as_it_is() -> None:
    run_ranks(2, _norm_alone)


def _leaves_early() -> None:
    model = wrapped(Block, auto_wrap_policy=None)
    if dist.get_rank() == 0:
        receive = dist.ProcessGroup.recv

        def late(*args, **kwargs):
            time.sleep(0.2)  # the peer has all it needs long before this rank asks for its part
            return receive(*args, **kwargs)

        dist.ProcessGroup.recv = late
    output = model(batch())
    torch.manual_seed(0)
    assert torch.equal(output, Block()(batch()))


def test_a_rank_may_drop_the_model_as_soon_as_its_forward_returned() -> None:
    run_ranks(2, _leaves_early)


class OwnHook(Block):
    """Hooks its own output, and reads its weight in the hook."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient + 0.0 * self.up.weight.sum())
        return y


class EnablesGrad(Block):
    @torch.enable_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class Generates(Block):
    def forward(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        return (row[None] for row in super().forward(x))


class Maps(Block):
    def forward(self, x: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return super().forward(x["x"])


class ReadsNumbers(Block):
    """`numpy()` of a weight, which may outlive the forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.up.weight.detach().numpy()
        return super().forward(x) * float(self.seen[0, 0] == self.up.weight[0, 0])


class Top(nn.Module):
    def __init__(self, build: type[Block]) -> None:
        super().__init__()
        self.first, self.second = build(), Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.first, Maps):
            return self.second(self.first(MappingProxyType({"x": x})))
        y = self.first(x)
        return self.second(torch.cat([*y]) if isinstance(self.first, Generates) else y)


def _trains_after_an_evaluation(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        model(x)
    return forward_backward(model, x)


def _odd_blocks() -> None:
    steps = batches_of(CASES["mlp"], dist.get_world_size(), steps=3)
    for build in (OwnHook, EnablesGrad, Generates, Maps, ReadsNumbers):
        for options in ({}, {"zero3_size": 1}):
            model = zero3(lambda build=build: Top(build), Block, **options)
            plain = seeded(lambda build=build: Top(build))
            assert_trains_alike(model, plain, steps, run=_trains_after_an_evaluation)
    # Where the full buffer is a copy in another dtype that lives for a step.
    losses = []
    for build in (Block, ReadsNumbers):
        model = zero3(
            lambda build=build: Top(build),
            Block,
            zero3_size=1,
            mixed_precision=MixedPrecision(param_dtype=torch.float64),
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in steps:
            losses.append(forward_backward(model, step[dist.get_rank()]))
            optimizer.step()
            optimizer.zero_grad()
    assert losses[:3] == losses[3:]


def test_blocks_do_what_torch_allows_with_hooks_modes_and_numbers() -> None:
    run_ranks(2, _odd_blocks)
