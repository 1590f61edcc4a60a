"""A forward or backward that fails changes nothing, and can be run again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from layerzero import BackwardPrefetch, MixedPrecision, ReductionPolicy, ZeRO3
from tests.harness.checks import named
from tests.harness.fault_at import FaultAt, differences, snapshot
from tests.harness.internals import root_state
from tests.harness.models import WIDTH, Block
from tests.harness.ranks import KeptRanks


class Net(nn.Module):
    """Blocks, the last of which is recomputed, a tied pair of layers, and the loss: outside of the
    model it would be in no pass, and an exception there unknown to the engine."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.head.weight = self.stem.weight
        self._reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[1](self.blocks[0](self.stem(x)))
        x = self.head(checkpoint(self.blocks[2], x, use_reentrant=self._reentrant))
        return x.float().square().sum()


Settings = dict[str, Any]
_BFLOAT = MixedPrecision(param_dtype=torch.bfloat16)
SETTINGS: list[Settings] = [
    {"accumulation": "unsharded"},
    {"accumulation": "sharded"},
    {"accumulation": "unsharded", "mixed_precision": _BFLOAT},
    {"accumulation": "sharded", "mixed_precision": _BFLOAT, "deterministic": True},
    {"zero3_size": 1, "accumulation": "unsharded"},
    {"zero3_size": 1, "outer": "replicate", "accumulation": "sharded"},
    {"outer": "shard", "reshard_after_forward": False, "accumulation": "unsharded"},
    {"backward_prefetch": BackwardPrefetch.BACKWARD_POST, "accumulation": "unsharded"},
    {"reduction": ReductionPolicy(in_flight="1MB"), "accumulation": "unsharded"},
    {"optional_modules": 1, "accumulation": "unsharded"},
]


def build(settings: Settings, reentrant: bool = False) -> tuple[ZeRO3, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net, arguments = Net(reentrant), dict(settings)
    if arguments.pop("optional_modules", None):
        arguments["optional_modules"] = [net.blocks[0]]
    model = ZeRO3(net, auto_wrap_policy={Block}, **arguments)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def batch(number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
    return torch.randn(3, WIDTH, generator=generator)


def micro_batch(
    model: ZeRO3, number: int, syncs: bool, after_forward: Callable[[], object] = lambda: None
) -> None:
    with contextlib.nullcontext() if syncs else model.no_sync():
        loss = model(batch(number))
        after_forward()
        loss.backward()


def step_of(
    model: ZeRO3, optimizer: torch.optim.Optimizer, number: int, run: Callable[..., Any]
) -> None:
    """Three micro-batches, the last of which reduces, and a step."""
    for part in range(3):
        run(model, 3 * number + part, part == 2)
    optimizer.step()
    optimizer.zero_grad()


def _sweep(settings: Settings, reentrant: bool, starts: tuple[int, ...], stride: int) -> int:
    """Fail once in each step, at a later operation each time, and run again what failed."""
    clean, clean_optimizer = build(settings, reentrant)
    model, optimizer = build(settings, reentrant)
    number, failures = 0, 0
    for which, start in enumerate(starts):
        at, reached = start, True
        while reached:
            reached = False
            calls = 0

            def run(
                model: ZeRO3, number: int, syncs: bool, which: int = which, at: int = at
            ) -> None:
                nonlocal reached, calls, failures
                calls += 1
                if calls - 1 == which:
                    root_state(model).backward.clear_abandoned()
                    before = snapshot(model, optimizer)
                    forwards: list[int] = []
                    try:
                        with FaultAt(at) as fault:
                            after_forward = partial(_append_count, forwards, fault)
                            micro_batch(model, number, syncs, after_forward)
                    except torch.OutOfMemoryError:
                        reached = True
                        failures += 1
                    _assert_alike(reached)
                    if not reached:
                        return
                    root_state(model).backward.clear_abandoned()
                    wrong = differences(before, snapshot(model, optimizer))
                    if forwards == [at - 1]:  # Between the two: no pass of the model's failed.
                        wrong = [each for each in wrong if not isinstance(before[each], dict)]
                    assert not wrong, f"operation {at} of micro-batch {which} changed {wrong}"
                micro_batch(model, number, syncs)

            step_of(clean, clean_optimizer, number, micro_batch)
            step_of(model, optimizer, number, run)
            for mine, theirs in zip(model.parameters(), clean.parameters(), strict=True):
                assert torch.equal(mine, theirs), f"after operation {at} of micro-batch {which}"
            number += 1
            at += stride
    return failures


def _append_count(counts: list[int], mode: FaultAt) -> None:
    counts.append(mode.count)


def _assert_alike(reached: bool) -> None:
    """A rank that is alone in a failure, or without one, would wait for the others in vain."""
    of_ranks: list[bool] = [reached] * dist.get_world_size()
    dist.all_gather_object(of_ranks, reached)
    assert all(each == reached for each in of_ranks), f"reached on ranks: {of_ranks}"


def _sweep_all(settings: list[Settings], reentrant: bool, stride: int) -> int:
    failures = 0
    for place, each in enumerate(settings):
        starts = tuple(1 + (place * 7 + which * 3) % stride for which in range(3))
        with named(each):
            failures += _sweep(each, reentrant, starts, stride)
    return failures


def _first_passes(settings: Settings, places: list[int], autocast: bool) -> int:
    """The first pass of a model, in which the engine also looks for writes into full parameters,
    fails at each of these operations, and is run again."""

    def run(fault: int) -> tuple[list[torch.Tensor], bool]:
        model, optimizer = build(settings)
        reached = False
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            try:
                with FaultAt(fault):
                    micro_batch(model, 0, True)
            except torch.OutOfMemoryError:
                reached = True
        if reached or not fault:
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                micro_batch(model, 0, True)
        optimizer.step()
        return [each.detach().clone() for each in model.parameters()], reached

    expected, _ = run(0)
    failures = 0
    for place in places:
        with named(f"operation {place}, {settings}, autocast {autocast}"):
            found, reached = run(place)
        assert all(map(torch.equal, found, expected)), f"operation {place} of the first pass"
        failures += reached
    return failures


def _some_passes() -> tuple[int, int]:
    later = _sweep_all([SETTINGS[0], SETTINGS[5]], False, 211)
    return later, _first_passes(SETTINGS[4], [31, 40, 49], False)


def test_a_pass_that_runs_out_of_memory_changes_nothing(ranks: KeptRanks) -> None:
    for later, first in ranks(2, _some_passes, timeout=90):
        assert later > 4 and first == 3


@pytest.mark.soak
@pytest.mark.parametrize("autocast", [False, True])
def test_the_first_pass_may_run_out_of_memory_at_any_operation(
    ranks: KeptRanks, autocast: bool
) -> None:
    for settings in SETTINGS:
        found = ranks(2, _first_passes, settings, [*range(1, 170)], autocast, timeout=1800)
        assert found[0] > 100


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_pass_may_run_out_of_memory_at_any_operation(
    ranks: KeptRanks, reentrant: bool, pytestconfig: pytest.Config
) -> None:
    if not pytestconfig.getoption("--seeds"):
        half = SETTINGS[2 + reentrant :: 2]
        (failures, _) = ranks(2, _sweep_all, half, reentrant, 149, timeout=120)
        assert failures > 2 * len(half)
        return
    for place in range(len(SETTINGS)):
        settings = SETTINGS[place : place + 1]
        (failures, _) = ranks(2, _sweep_all, settings, reentrant, 3, timeout=1800)
        assert failures > 50
