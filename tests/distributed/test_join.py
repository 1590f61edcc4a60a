"""Ranks with uneven numbers of batches train as one process does on all batches (`join`).

A *plan* gives each rank the numbers of micro-batches of its steps: ((2, 1), (1,)) means that rank 0
takes a step of two and one of one, and rank 1 one of one. Every step adds the gradients of all its
micro-batches on all ranks.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import layerzero
from layerzero import ZeRO3
from tests.harness.models import Block, Mlp
from tests.harness.ranks import run_ranks

TIMEOUT = timedelta(seconds=20)
Plan = tuple[tuple[int, ...], ...]


def _batch(rank: int, step: int, micro: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + 100 * step + micro)
    return torch.randn(3, 5, generator=generator, dtype=torch.float64)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return (output**2).mean()


def _model() -> nn.Module:
    torch.manual_seed(0)
    return Mlp().double()


def _optimizer(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)


def _train_here(plan: Plan, clips: float | None, active: bool = False) -> nn.Module:
    """One process on the batches of all ranks."""
    model = _model()
    optimizer, scheduler = _optimizer(model)
    for step in range(max(map(len, plan))):
        ranks = [rank for rank, steps in enumerate(plan) if len(steps) > step]
        for micro in range(max(plan[rank][step] for rank in ranks)):
            for rank in ranks:
                if micro < plan[rank][step]:
                    number = len(ranks) if active else len(plan)
                    (loss_of(model(_batch(rank, step, micro))) / number).backward()
        if clips is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clips)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return model


def _loop(model: ZeRO3, plan: Plan, clips: float | None, optimizer: Any, scheduler: Any) -> None:
    rank = dist.get_rank()
    for step, count in enumerate(plan[rank]):
        for micro in range(count):
            last = micro == count - 1
            with contextlib.nullcontext() if last else model.no_sync():
                loss_of(model(_batch(rank, step, micro))).backward()
        if clips is not None:
            model.clip_grad_norm_(clips)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def _train(plan: Plan, clips: float | None = None, active: bool = False, **settings: Any) -> ZeRO3:
    model = ZeRO3(_model(), auto_wrap_policy={Block}, timeout=TIMEOUT, **settings)
    optimizer, scheduler = _optimizer(model)
    with layerzero.join(model, optimizer, scheduler, divide_by_initial_world_size=not active):
        _loop(model, plan, clips, optimizer, scheduler)
    _check(model, plan, clips, active)
    steps = max(map(len, plan))
    assert scheduler.last_epoch == steps
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05 * 0.8**steps)
    return model


def _check(model: ZeRO3, plan: Plan, clips: float | None, active: bool) -> None:
    expected = _train_here(plan, clips, active)
    assert type(model._root_state).__name__ in ("RootState", "OptionalRoot")
    for name, parameter in model.named_parameters():
        assert parameter.grad is None, name
    with model.summon_full_params(writeback=False):
        for (name, ours), theirs in zip(
            model.named_parameters(), expected.parameters(), strict=True
        ):
            torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12, msg=f"{name} {plan}")


def _every_distribution() -> None:
    world_size = dist.get_world_size()
    for counts in itertools.product(range(4), repeat=world_size):
        if any(counts):
            clips = 0.05 if sum(counts) % 2 else None
            _train(tuple((1,) * count for count in counts), clips, active=counts[0] % 2 == 1)


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_every_distribution_of_batches_trains_as_one_process(world_size: int) -> None:
    run_ranks(world_size, _every_distribution, timeout=120)


# Micro-batches ----------------------------------------------------------------------------------

SETTINGS: list[dict[str, Any]] = [
    {},
    {"accumulation": "sharded"},
    {"accumulation": "unsharded", "reshard_after_forward": False},
    {"deterministic": True, "limit_all_gathers": 1},
    {"backward_prefetch": layerzero.BackwardPrefetch.BACKWARD_POST, "forward_prefetch": 2},
    {"reduction": layerzero.ReductionPolicy(in_flight="1MB")},
    {"offload": layerzero.OffloadPolicy(params=True, grads=True)},
]
LAYERED: list[dict[str, Any]] = [
    {"zero3_size": 2, "outer": outer, "accumulation": accumulation}
    for outer in ("zero1", "replicate", "shard")
    for accumulation in ("sharded", "unsharded")
]


def _random_plan(rng: random.Random, world_size: int) -> Plan:
    plan = tuple(
        tuple(rng.randint(1, 3) for _ in range(rng.randint(0, 3))) for _ in range(world_size)
    )
    return plan if any(plan) else ((1,), *plan[1:])


def _random_plans(seeds: range, settings: list[dict[str, Any]]) -> None:
    for seed in seeds:
        rng = random.Random(seed)
        plan = _random_plan(rng, dist.get_world_size())
        clips = rng.choice([None, 0.05])
        chosen = settings[seed % len(settings)]
        try:
            _train(plan, clips, active=rng.random() < 0.5, **chosen)
        except Exception as error:
            raise AssertionError(f"seed {seed}, plan {plan}, {chosen}") from error


def test_ranks_differ_in_micro_batches() -> None:
    run_ranks(2, _random_plans, range(7), SETTINGS, timeout=60)


@pytest.mark.slow
def test_random_plans_on_four_ranks() -> None:
    run_ranks(4, _random_plans, range(26), SETTINGS + LAYERED, timeout=120)
