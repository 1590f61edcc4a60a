"""A dead, stopped or silent rank: the others get an error that says who and where.

Ranks that take different paths through the model are in test_parting.py.
"""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from layerzero import CollectiveError, ZeRO3, checkpoint
from tests.harness.checks import collective_error
from tests.harness.models import WIDTH, Block, Mlp
from tests.harness.ranks import run_ranks

TIMEOUT = timedelta(seconds=2)
GRACE_S = 30.0


def wrapped(**settings: Any) -> ZeRO3:
    torch.manual_seed(0)
    return ZeRO3(Mlp(3), auto_wrap_policy={Block}, timeout=TIMEOUT, **settings)


error_of = partial(collective_error, within_s=TIMEOUT.total_seconds() + GRACE_S)


def train(model: ZeRO3, steps: int = 1) -> None:
    for _ in range(steps):
        model(torch.randn(3, WIDTH)).sum().backward()


def _exits(during: str, zero3_size: int | None = None) -> str | None:
    """The last rank exits in its third step; then no optimizer steps on what backward has left."""
    model = wrapped(zero3_size=zero3_size)
    other = ZeRO3(nn.Linear(2, 2), dist.new_group([dist.get_rank()]))
    optimizers = [torch.optim.SGD(each.parameters(), lr=1.0) for each in (model, other)]
    both = torch.optim.SGD([*other.parameters(), *model.parameters()], lr=1.0)
    train(model, 2)
    other(torch.ones(2, 2)).sum().backward()
    if dist.get_rank() == dist.get_world_size() - 1:
        if during == "forward":
            model.module.blocks[1].up.register_forward_pre_hook(lambda *_: os._exit(7))
        loss = model(torch.randn(3, WIDTH)).sum()
        loss.register_hook(lambda _: os._exit(7))
        loss.backward()
    message = error_of(lambda: train(model))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for optimizer in (optimizers[0], both):
        with pytest.raises(CollectiveError, match="an earlier collective") as caught:
            optimizer.step()
        assert message in str(caught.value)
    for parameter, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, value)
    optimizers[1].step()  # Of a model that goes on.
    return message


@pytest.mark.parametrize(
    ("world_size", "during"),
    [(2, "backward"), (2, "forward"), pytest.param(3, "backward", marks=pytest.mark.slow)],
)
def test_a_rank_that_exits_is_named_and_no_optimizer_steps(world_size: int, during: str) -> None:
    last = world_size - 1
    messages = run_ranks(world_size, _exits, during, expect_exit={last: 7})
    for rank, message in enumerate(messages[:-1]):
        assert f"rank {rank}" in message
        assert f"rank {last}" in message
        assert "blocks." in message or "the root unit" in message
        assert "all-gather" in message or "reduce-scatter" in message


def test_a_rank_that_exits_is_named_across_shard_groups() -> None:
    """Rank 0 shares no group with rank 3: it waits for others that wait for it."""
    for message in run_ranks(4, _exits, "backward", 2, expect_exit={3: 7})[:3]:
        assert "rank 3: no report" in message, message
        assert "Look at the ranks without a report first" in message


def _stops(folder: Path) -> str | None:
    model = wrapped()
    train(model)
    if dist.get_rank() == 1:
        (folder / "pid").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(9)
    try:
        return error_of(lambda: train(model))
    finally:
        os.kill(int((folder / "pid").read_text()), signal.SIGCONT)


def test_a_stopped_rank_is_named(tmp_path: Path) -> None:
    message = run_ranks(2, _stops, tmp_path, expect_exit={1: 9})[0]
    assert "rank 0 got no answer from rank 1" in message
    assert "rank 1: no report" in message
    assert "within the timeout of 2 s" in message


def _waits_for_one_that_left(folder: str) -> str | None:
    """Each other rank shares a model with the last one, which is done early; its process lives on
    until the others end."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    groups = [dist.new_group([each, last]) for each in range(last)]
    for each, group in enumerate(groups):
        dist.barrier()  # Else the second waits while the last one is with the first.
        if rank in (each, last):
            model = wrapped(process_group=group)
            train(model)
    if rank == 0:
        first = error_of(lambda: train(model))
        start = time.monotonic()
        again = error_of(lambda: train(model))
        assert time.monotonic() - start < 1.0, "it does not wait a second time"
        assert first in again
        assert "restart the ranks" in again
        return first
    if rank == 1:
        return error_of(lambda: model.clip_grad_norm_(1.0))
    return None if rank == last else error_of(lambda: checkpoint.save(folder, model))


def test_a_rank_that_finished_early_is_named_and_a_later_use_repeats_it(tmp_path: Path) -> None:
    trains, clips, saves, _ = run_ranks(4, _waits_for_one_that_left, str(tmp_path))
    assert "rank 3: no report" in trains
    assert "Look at the ranks without a report first" in trains
    assert "gradient norm" in clips, "a small collective has the timeout, too"
    assert "exchange of the ranks that save or load together" in saves
    assert "every rank must, also to save or load (not under `if rank == 0:`)" in saves
