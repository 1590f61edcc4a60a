"""Modules that a rank may skip, in less usual hands: recomputed by a reentrant checkpoint, called
by themselves, and in the stages of torch's own pipelines."""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.utils.checkpoint import checkpoint

from layerzero import CollectiveError, ZeRO3
from layerzero.watch import desync
from tests.harness.checks import assert_bitwise, assert_close_in_float64
from tests.harness.models import WIDTH
from tests.harness.ranks import on_ranks, run_ranks
from tests.harness.reference import full_parameters
from tests.harness.regions import counted_exchanges

TIMEOUT = timedelta(seconds=25)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Part(nn.Module):
    """With a tower between two blocks. Where it is not told, its input says whether to enter it."""

    def __init__(self, way: str = "plain") -> None:
        super().__init__()
        self.stem, self.trunk = Block(), Block()
        self.tower = nn.Sequential(Block(), Block())
        self.way = way

    def forward(self, x: Tensor, enters: bool | None = None) -> Tensor:
        x = self.stem(x)
        if x.sum() > 0 if enters is None else enters:
            x = self._entered(x)
        return self.trunk(x)

    def _entered(self, x: Tensor) -> Tensor:
        if self.way == "recomputed":
            return checkpoint(self.tower, x, use_reentrant=True)  # type: ignore[no-any-return]
        if self.way == "recomputed by block":
            for block in self.tower:
                x = checkpoint(block, x, use_reentrant=True)
            return x
        if self.way == "without gradients":
            with torch.no_grad():
                y = self.tower(x)
            return x + y
        return self.tower(x)  # type: ignore[no-any-return]


def sharded(part: Part, group: Any = None, timeout: timedelta = TIMEOUT) -> ZeRO3:
    return ZeRO3(
        part, group, auto_wrap_policy={Block}, optional_modules=[part.tower], timeout=timeout
    )


def assert_same_weights(model: ZeRO3, twin: nn.Module) -> None:
    with model.summon_full_params():
        for (name, one), other in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert_bitwise(one.detach(), other.detach(), name)


# Reentrant checkpoints ----------------------------------------------------------------------------


@pytest.mark.slow
@on_ranks(2)
def test_a_reentrant_checkpoint_may_recompute_a_tower_frozen_or_not() -> None:
    found = {}
    """Exchanges in a known step, for each way."""
    for way in ("recomputed", "recomputed by block", "without gradients"):
        for is_frozen in (True, False):
            torch.manual_seed(0)
            part = Part(way)
            part.tower.requires_grad_(not is_frozen)
            twin = copy.deepcopy(part)
            model = sharded(part)
            optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, twin)]
            for step, enters in enumerate([(0, 0), (1, 1), (1, 0), (0, 1), (1, 1)]):
                torch.manual_seed(step)
                rows = torch.randn(2, 3, WIDTH)
                own = rows[dist.get_rank()].requires_grad_()
                with counted_exchanges() as exchanges:
                    model(own, bool(enters[dist.get_rank()])).square().mean().backward()
                found[f"{way}, {is_frozen}"] = len(exchanges)
                for each, enter in zip(rows, enters, strict=True):
                    (twin(each.detach().requires_grad_(), enter).square().mean() / 2).backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            assert_same_weights(model, twin)
    # In backward ranks find that no gradient of the tower exists.
    assert found["without gradients, True"] == 2
    assert found["without gradients, False"] == 3


# A tower at the end -------------------------------------------------------------------------------


class Wrap(nn.Module):
    """A unit that every rank calls, with a tower inside. Without an image it returns its input."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.scale = Block(), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, enters: bool) -> Tensor:
        return x + self.tower(x) * self.scale if enters else x


class Ends(nn.Module):
    """Its last unit is that of a tower, or one that every rank calls, as each rank has it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.wrap = Block(), Wrap()
        self.tail = nn.Sequential(Block(), Block())

    def forward(self, x: Tensor, inside: bool, tail: bool) -> Tensor:
        x = self.wrap(self.stem(x), inside)
        return self.tail(x) if tail else x


def _losses(model: nn.Module, step: int, rank: int) -> list[Tensor]:
    """In the order of their backwards: of one forward that ranks end in different towers, or of two
    forwards in flight, of which both ranks enter the tail in one."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    rows = torch.randn(2, 3, WIDTH, generator=generator, dtype=torch.float64)
    if step < 8:
        inside, tail = ((0, 0), (1, 0), (0, 1), (1, 1))[step % 4], ((1, 1), (1, 0))[step // 4]
        return [model(rows[0], bool(inside[rank]), bool(tail[rank])).square().mean()]
    some = ((1, 1), (1, 0), (0, 1), (0, 0))[step // 2 % 4][rank]
    enters = (True, bool(some)) if step % 2 else (bool(some), True)
    losses = [model(x, False, tail).square().mean() for x, tail in zip(rows, enters, strict=True)]
    return losses if step % 2 else losses[::-1]


@on_ranks(2)
def test_ranks_may_end_a_forward_in_different_units() -> None:
    torch.manual_seed(0)
    module = Ends().double()
    twin = copy.deepcopy(module)
    model = ZeRO3(
        module,
        auto_wrap_policy={Block, Wrap},
        optional_modules=[module.wrap.tower, module.tail],
        timeout=TIMEOUT,
    )
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05) for each in (model, twin)]
    for step in range(24):
        for loss in _losses(model, step, dist.get_rank()):
            loss.backward()
        for rank in range(2):
            for loss in _losses(twin, step, rank):
                (loss / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    # What is used twice is reduced each time, over ranks before uses.
    assert_close_in_float64(full_parameters(model), full_parameters(twin), "after")


# Called by itself ---------------------------------------------------------------------------------


def _on_one_rank_alone() -> list[str]:
    desync.PAUSE_S = 0.1
    messages = []
    for steps in (0, 3):
        group = dist.new_group(timeout=TIMEOUT)  # A failure leaves its connections unusable.
        model = sharded(Part(), group)
        x = torch.ones(2, WIDTH)
        for step in range(steps):
            model(x, step % 2 == dist.get_rank()).sum().backward()
        model.tower[0](x)  # on all ranks
        with pytest.raises(CollectiveError) as caught:
            if dist.get_rank() == 0:
                model.tower[0](x)
            model(x, False).sum().backward()
        messages.append(str(caught.value))
        store = dist.distributed_c10d._get_default_store()
        store.set(f"{steps} {dist.get_rank()}", "")
        store.wait([f"{steps} {rank}" for rank in range(2)])
    return messages


def test_a_tower_that_one_rank_calls_by_itself_is_an_error_that_says_so() -> None:
    for messages in run_ranks(2, _on_one_rank_alone):
        for message in messages:
            wish = "rank 0 issued agreement of optional modules in a call of 'tower.0' outside the"
            assert wish in message, message


# Stages of torch's pipelines ----------------------------------------------------------------------

MICRO_BATCHES = 4


@pytest.mark.slow
@on_ranks(4, timeout=120, in_float64=True)
def test_stages_of_torchs_pipelines_may_have_towers_that_ranks_skip() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    for schedule_class, per_rank in (
        (ScheduleGPipe, 1),
        (Schedule1F1B, 1),
        (ScheduleInterleaved1F1B, 2),
    ):
        _train_stages(mesh, schedule_class, per_rank)


def _train_stages(mesh: DeviceMesh, schedule_class: type[Any], per_rank: int) -> None:
    place, num_stages = mesh["pp"].get_local_rank(), 2 * per_rank
    torch.manual_seed(0)
    whole = nn.Sequential(*(Part() for _ in range(num_stages)))
    twin = copy.deepcopy(whole)
    group = mesh["pp"].get_group()
    models = {index: sharded(whole[index], mesh["dp"]) for index in range(place, num_stages, 2)}
    stages = [
        PipelineStage(model, index, num_stages, torch.device("cpu"), group=group)
        for index, model in models.items()
    ]
    schedule = schedule_class(
        stages if per_rank > 1 else stages[0], MICRO_BATCHES, loss_fn=F.mse_loss
    )
    parts = [*models.values(), twin]
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.2) for part in parts]
    for step in range(5):
        torch.manual_seed(step)
        batches = torch.randn(2, 2, 2 * MICRO_BATCHES, WIDTH)
        x, target = batches[mesh["dp"].get_local_rank()]
        if place == 0:
            schedule.step(x)
        else:
            schedule.step(target=target, losses=[])
        for batch in batches:
            pairs = zip(*(each.chunk(MICRO_BATCHES) for each in batch), strict=True)
            for given, wanted in pairs:
                (F.mse_loss(twin(given), wanted) / MICRO_BATCHES / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    # Micro-batches are summed on each rank first, those of one process one after the other.
    for index, model in models.items():
        with model.summon_full_params():
            for name, other in twin[index].named_parameters():
                assert_close_in_float64(model.get_parameter(name).detach(), other.detach(), name)
