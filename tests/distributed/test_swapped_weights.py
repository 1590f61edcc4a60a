"""Weights that are written or swapped where a step does not expect it.

Swapped through `.data` for a while, as averages are for an evaluation; written inside a forward, as
momentum encoders do; written between a forward and its backward.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.func import functional_call

from layerzero import MixedPrecision, ZeRO3
from layerzero.optim import AdamW
from tests.harness.checks import HAS_FMA, assert_bitwise
from tests.harness.compare import assert_same_values, zero3
from tests.harness.models import CASES, Block, Mlp
from tests.harness.ranks import run_ranks
from tests.harness.reference import batches_of, full_parameters, seeded


class _Average:
    """As tutorials write it: the weights are kept as they are, and put back."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.shadow = {name: p.data.clone() for name, p in model.named_parameters()}

    def update(self) -> None:
        for name, p in self.model.named_parameters():
            self.shadow[name] = (0.3 * p.data + 0.7 * self.shadow[name]).clone()

    def apply(self) -> None:
        self.backup = {}
        for name, p in self.model.named_parameters():
            self.backup[name] = p.data
            p.data = self.shadow[name]

    def restore(self) -> None:
        for name, p in self.model.named_parameters():
            p.data = self.backup[name]


def _run(model: nn.Module, optimizer: torch.optim.Optimizer, where: str) -> dict[str, torch.Tensor]:
    average, outputs = _Average(model), {}
    batches = [step[0] for step in batches_of(CASES["mlp"], 1, steps=8)]

    def evaluate(name: str) -> None:
        average.apply()
        with torch.inference_mode() if where == "inference" else torch.no_grad():
            outputs[name] = model(batches[-1]).clone()
        if where == "summoned":
            outputs.update({f"{name} {key}": p for key, p in _values(model).items()})
        average.restore()

    for step in range(3):
        optimizer.zero_grad()
        if where == "amid accumulation":
            with model.no_sync() if isinstance(model, ZeRO3) else nullcontext():
                model(batches[step + 3]).square().mean().backward()
            evaluate(f"amid {step}")
        loss = model(batches[step]).square().mean()
        if where == "before backward":
            evaluate(f"before {step}")
        loss.backward()
        optimizer.step()
        average.update()
        evaluate(f"after {step}")
    return {**outputs, **_values(model)}


class _Wide(Mlp):
    """Computes in float64 with weights of float32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.device("meta"):
            skeleton = Mlp()
        wide = {name: parameter.double() for name, parameter in self.named_parameters()}
        return functional_call(skeleton, wide, x.double())


def _values(model: nn.Module) -> dict[str, torch.Tensor]:
    if isinstance(model, ZeRO3):
        return full_parameters(model)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def _all_modes() -> None:
    def sgd(parameters: object) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    cases: list[tuple[str, Callable[..., torch.optim.Optimizer], dict[str, object]]] = [
        ("after", sgd, {}),
        ("inference", sgd, {}),
        ("summoned", sgd, {"reshard_after_forward": False}),
        ("before backward", sgd, {}),
        ("before backward", sgd, {"zero3_size": 1}),
        ("before backward", sgd, {"mixed_precision": MixedPrecision(param_dtype=torch.float64)}),
        ("amid accumulation", sgd, {"zero3_size": 1, "outer": "replicate"}),
        ("amid accumulation", sgd, {"accumulation": "unsharded"}),
        *[("amid accumulation", AdamW, {})] * HAS_FMA,
    ]
    for where, build, options in cases:
        model = zero3(Mlp, Block, **options)
        plain = seeded(_Wide if "mixed_precision" in options else Mlp)
        ours = _run(model, build(model.parameters()), where)
        plain_build = partial(torch.optim.AdamW, fused=True) if build is AdamW else build
        expected = _run(plain, plain_build(plain.parameters()), where)
        assert ours.keys() == expected.keys()
        for name, value in expected.items():
            assert_bitwise(ours[name], value, f"{where}, {options}, {name}")


@pytest.mark.parametrize("world_size", [1, 2])
def test_weights_that_are_swapped_for_an_evaluation_come_back(world_size: int) -> None:
    run_ranks(world_size, _all_modes)


class _Momentum(nn.Module):
    """MoCo, BYOL: the forward moves one half towards the other, before it uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = Block(), Block()
        self.target.load_state_dict(self.online.state_dict())
        self.target.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        online = self.online(x)
        with torch.no_grad():
            before = self.target(x)
            for own, other in zip(self.target.parameters(), self.online.parameters(), strict=True):
                own.mul_(0.5).add_(other, alpha=0.5)
            after = self.target(x)
        return online - after + before


def _moves_in_forward() -> None:
    batch = batches_of(CASES["mlp"], 1, steps=1)[0][0]  # Of all ranks, so that one process follows.
    for options in (
        {},
        {"forward_prefetch": False},
        {"reshard_after_forward": False},
        {"reshard_after_forward": "compute_shard", "zero3_size": 1},
        {"zero3_size": 1, "outer": "replicate"},
    ):
        model, plain = zero3(_Momentum, Block, **options), seeded(_Momentum)
        for each in (model, plain):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
            for _ in range(4):
                each(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert_same_values(model, plain, f"{options}: parameter")


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_forward_may_write_weights_before_it_uses_them(world_size: int) -> None:
    run_ranks(world_size, _moves_in_forward)


class _TwoHeads(nn.Module):
    """Both heads are parameters of one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = Block(), Block()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.actor(x).square().mean(), self.critic(x).square().mean()


def _steps_between_two_backwards(
    model: nn.Module, build: Callable[..., torch.optim.Optimizer], batch: torch.Tensor
) -> None:
    actor, critic = build(model.actor.parameters()), build(model.critic.parameters())
    for _ in range(3):
        one, other = model(batch)
        one.backward()
        actor.step()
        actor.zero_grad()
        other.backward()
        critic.step()
        critic.zero_grad()


def _old_graphs() -> None:
    builds: list[Callable[..., torch.optim.Optimizer]] = [
        partial(torch.optim.SGD, lr=0.1),
        partial(AdamW, lr=0.1),
    ]
    batch = batches_of(CASES["mlp"], 1, steps=1)[0][0]
    for build in builds:
        for options in ({}, {"zero3_size": 1}):
            # Of weights that the step wrote: torch's error, on all ranks.
            model = zero3(Mlp, Block, **options)
            optimizer = build(model.parameters())
            one, other = (model(batch + shift).square().mean() for shift in (0, 1))
            with model.summon_full_params():
                pass  # Which writes nothing.
            one.backward()
            optimizer.step()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                other.backward()
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            # Of other weights in the same unit: right.
            ours, plain = zero3(_TwoHeads, **options), seeded(_TwoHeads)
            _steps_between_two_backwards(ours, build, batch)
            plain_build = builds[0] if build is builds[0] else partial(torch.optim.AdamW, lr=0.1)
            _steps_between_two_backwards(plain, plain_build, batch)
            if build is builds[0]:
                assert_same_values(ours, plain)


def test_a_graph_made_before_its_weights_were_written_is_refused_as_in_torch() -> None:
    run_ranks(2, _old_graphs)
