"""A dead, stopped, silent or diverging rank: the others get an error that says who and where."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from layerzero import CollectiveError, ZeRO3, checkpoint
from tests.harness.models import WIDTH, Block, Mlp
from tests.harness.ranks import run_ranks

TIMEOUT = timedelta(seconds=3)
GRACE_S = 30.0


def wrapped() -> ZeRO3:
    torch.manual_seed(0)
    return ZeRO3(Mlp(3), auto_wrap_policy={Block}, timeout=TIMEOUT)


def batch() -> torch.Tensor:
    return torch.randn(3, WIDTH)


def error_of(run) -> str:
    """The message of the CollectiveError that `run` must raise in time."""
    start = time.monotonic()
    with pytest.raises(CollectiveError) as caught:
        run()
    assert time.monotonic() - start < TIMEOUT.total_seconds() + GRACE_S
    return str(caught.value)


def train(model: ZeRO3, steps: int) -> None:
    for _ in range(steps):
        model(batch()).sum().backward()


def _exits(during: str) -> str | None:
    model = wrapped()
    train(model, 2)
    if dist.get_rank() == 1:
        if during == "forward":
            model.module.blocks[1].up.register_forward_pre_hook(lambda *_: os._exit(7))
            model(batch())
        else:
            loss = model(batch()).sum()
            loss.register_hook(lambda _: os._exit(7))
            loss.backward()
    return error_of(lambda: train(model, 1))


@pytest.mark.parametrize("during", ["forward", "backward"])
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_rank_that_exits_is_named(during: str, world_size: int) -> None:
    messages = run_ranks(world_size, _exits, during, expect_exit={1: 7})
    for rank in {0, 2} & set(range(world_size)):
        message = messages[rank]
        assert f"rank {rank}" in message
        assert "rank 1" in message
        assert "blocks." in message or "the root unit" in message
        assert "all-gather" in message or "reduce-scatter" in message


def _steps_after_failure() -> None:
    model, other = wrapped(), ZeRO3(nn.Linear(2, 2), dist.new_group([dist.get_rank()]))
    optimizers = [torch.optim.SGD(each.parameters(), lr=1.0) for each in (model, other)]
    both = torch.optim.SGD([*other.parameters(), *model.parameters()], lr=1.0)
    train(model, 2)
    other(torch.ones(2, 2)).sum().backward()
    if dist.get_rank() == 1:
        os._exit(7)
    earlier = error_of(lambda: train(model, 1))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for optimizer in (optimizers[0], both):
        with pytest.raises(CollectiveError, match="an earlier collective") as caught:
            optimizer.step()
        assert earlier in str(caught.value)
    for parameter, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, value)
    optimizers[1].step()  # Of a model that goes on.


def test_no_optimizer_steps_on_gradients_of_a_failed_backward() -> None:
    run_ranks(2, _steps_after_failure, expect_exit={1: 7})


def _exits_in_layers(during: str) -> str | None:
    torch.manual_seed(0)
    model = ZeRO3(Mlp(3), auto_wrap_policy={Block}, timeout=TIMEOUT, zero3_size=2)
    train(model, 2)
    if dist.get_rank() == 3:
        if during == "forward":
            model.module.blocks[1].up.register_forward_pre_hook(lambda *_: os._exit(7))
        loss = model(batch()).sum()
        loss.register_hook(lambda _: os._exit(7))
        loss.backward()
    return error_of(lambda: train(model, 1))


@pytest.mark.parametrize("during", [pytest.param("forward", marks=pytest.mark.slow), "backward"])
def test_a_rank_that_exits_is_named_across_shard_groups(during: str) -> None:
    """Rank 0 shares no group with rank 3: it waits for others that wait for it."""
    messages = run_ranks(4, _exits_in_layers, during, expect_exit={3: 7})
    for message in messages[:3]:
        assert "rank 3: no report" in message, message
        assert "Look at the ranks without a report first" in message


def _stops(folder: Path) -> str | None:
    model = wrapped()
    train(model, 1)
    if dist.get_rank() == 1:
        (folder / "pid").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(9)
    try:
        return error_of(lambda: train(model, 1))
    finally:
        os.kill(int((folder / "pid").read_text()), signal.SIGCONT)


def test_a_stopped_rank_is_named(tmp_path: Path) -> None:
    message = run_ranks(2, _stops, tmp_path, expect_exit={1: 9})[0]
    assert "rank 0 got no answer from rank 1" in message
    assert "rank 1: no report" in message
    assert "within the timeout of 3 s" in message


class Detour(nn.Module):
    """Rank 1 may go another way."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.route = [0, 1, 2, 3]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.route:
            x = self.blocks[index](x)
        return x


def _diverges(route: list[int], prefetch: bool) -> str:
    torch.manual_seed(0)
    model = ZeRO3(Detour(), auto_wrap_policy={Block}, timeout=TIMEOUT, forward_prefetch=prefetch)
    train(model, 2)
    if dist.get_rank() == 1:
        model.module.route = route
    return error_of(lambda: train(model, 1))


@pytest.mark.parametrize("prefetch", [False, True], ids=["on demand", "prefetching"])
@pytest.mark.parametrize(
    "route", [[0, 2, 3], [0, 2, 1, 3], [0, 1, 1, 3]], ids=["skips", "swaps", "repeats"]
)
def test_a_rank_on_another_path_gives_every_rank_an_error(route, prefetch: bool) -> None:
    messages = run_ranks(2, _diverges, route, prefetch)
    for rank, message in enumerate(messages):
        assert f"rank {rank} got no answer from rank {1 - rank}" in message
        assert "blocks." in message
    # At least one of them saw both reports, and says that the paths differ.
    assert any("different paths through the model" in message for message in messages)


def _stays_away() -> str | None:
    model = wrapped()
    train(model, 1)
    if dist.get_rank() == 1:
        return None  # Done early; its process lives on until the other ends.
    return error_of(lambda: train(model, 1))


def test_a_rank_that_finished_early_is_named() -> None:
    message = run_ranks(2, _stays_away)[0]
    assert "rank 1: no report" in message
    assert "Look at the ranks without a report first" in message


def _saves_alone(folder: str) -> str | None:
    model = wrapped()
    return error_of(lambda: checkpoint.save(folder, model)) if dist.get_rank() == 0 else None


def test_a_save_on_one_rank_alone_says_that_all_must_call_it(tmp_path: Path) -> None:
    message = run_ranks(2, _saves_alone, str(tmp_path))[0]
    assert "exchange of the ranks that save or load together" in message
    assert "every rank must, also to save or load (no `if rank == 0:`)" in message


def _after_a_failure() -> None:
    model = wrapped()
    train(model, 1)
    if dist.get_rank() == 1:
        return
    first = error_of(lambda: train(model, 1))
    start = time.monotonic()
    again = error_of(lambda: train(model, 1))
    assert time.monotonic() - start < 1.0, "it does not wait a second time"
    assert first in again
    assert "restart the ranks" in again


def test_every_later_use_repeats_the_first_error() -> None:
    run_ranks(2, _after_a_failure)


def _clips_alone() -> str | None:
    model = wrapped()
    train(model, 1)
    if dist.get_rank() == 1:
        return None
    return error_of(lambda: model.clip_grad_norm_(1.0))


def test_a_small_collective_has_the_timeout_too() -> None:
    message = run_ranks(2, _clips_alone)[0]
    assert "gradient norm" in message
