"""Ranks that part on gloo are told at once, long before the timeout; slow ranks are left alone."""

import logging
import os
import re
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from layerzero import CollectiveError, ZeRO3
from layerzero.watch import desync, diagnosis
from tests.harness.checks import error_in_time
from tests.harness.models import WIDTH, Block
from tests.harness.ranks import on_ranks, run_ranks

TIMEOUT = timedelta(seconds=55)
AT_ONCE_S = 20.0
"""Far below the timeout, and far above the second or so that it takes on a quiet machine."""


class Routed(nn.Module):
    """Blocks of equal size, called in an order that each rank may change."""

    def __init__(self, width: int = 2 * WIDTH) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.last = nn.Linear(WIDTH, width)
        self.route = [0, 1, 2, 3]
        self.used = 1
        self.pause_s = 0.0

    def forward(self, x: Tensor) -> Tensor:
        outputs = []
        for index in self.route:
            time.sleep(self.pause_s)
            x = self.blocks[index](x)
            outputs.append(x.sum())
        return torch.stack([*outputs[: self.used], self.last(x).sum()]).sum()


def wrapped(group: dist.ProcessGroup | None = None, width: int = WIDTH, **options) -> ZeRO3:
    torch.manual_seed(0)
    units = {Block, nn.Linear}
    return ZeRO3(
        Routed(width),
        group,
        auto_wrap_policy=lambda module, fqn: type(module) in units and "." not in fqn[7:],
        timeout=TIMEOUT,
        **options,
    )


def train(model: ZeRO3, steps: int = 1) -> float:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = torch.zeros(())
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        loss = model(torch.randn(3, WIDTH, generator=generator)) / WIDTH
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


error_of = partial(error_in_time, within_s=AT_ONCE_S)


def _part() -> dict[str, str]:
    """Each case on a group of its own: a failure leaves the connections of a group unusable."""
    desync.LONGEST_PAUSE_S = 0.1
    is_other = dist.get_rank() == 1

    def goes(route: list[int], steps: int) -> Callable[[dist.ProcessGroup], str]:
        def case(group: dist.ProcessGroup) -> str:
            model = wrapped(group)
            train(model, steps)
            if is_other:
                model.module.route = route
            return error_of(lambda: train(model, 2))

        return case

    def parts_in_backward(group: dist.ProcessGroup) -> str:
        model = wrapped(group)
        model.module.used = 0
        model.module.route = [0]
        if is_other:
            model.module.last.weight.requires_grad_()
            return error_of(lambda: train(model, 3))

        def without_last() -> None:
            for _ in range(3):
                hidden = []
                handle = model.module.blocks[0].register_forward_hook(
                    lambda module, args, output, hidden=hidden: hidden.append(output)
                )
                model(torch.randn(3, WIDTH))
                handle.remove()
                hidden[0].sum().backward()

        return error_of(without_last)

    def clips_alone(group: dist.ProcessGroup) -> str:
        model = wrapped(group)
        train(model, 1)
        if is_other:
            return error_of(lambda: model.clip_grad_norm_(1.0))
        return error_of(lambda: train(model))

    cases = {
        "first forward": goes([1], 0),
        "later step": goes([0, 1, 3], 2),
        "swapped": goes([0, 2, 1, 3], 2),
        "repeated": goes([0, 1, 2, 1, 3], 1),
        "backward": parts_in_backward,
        "clipping": clips_alone,
    }
    messages = {}
    for name, case in cases.items():
        group = dist.new_group(timeout=TIMEOUT)
        try:
            messages[name] = case(group)
        except BaseException as error:
            raise AssertionError(name) from error
        # A rank that is ahead would break the next group's connections.
        store = dist.distributed_c10d._get_default_store()
        store.set(f"{name}/{dist.get_rank()}", "")
        store.wait([f"{name}/{rank}" for rank in range(2)])
    return messages


def test_ranks_that_diverge_fail_at_once() -> None:
    first, second = run_ranks(2, _part)
    for name, message in first.items():
        # One finds out, and both say the same.
        verdict = message.partition("(the ranks took ")[2].partition(").\n")[0]
        assert "rank 0" in verdict and "rank 1" in verdict, (name, message)
        assert verdict in second[name], (name, second[name])
        assert "rank 0 got no answer from rank 1" in message
        assert "Every rank must call the same units in the same order" in message
    ways = "rank 0 issued all-gather of blocks.0, rank 1 issued all-gather of blocks.1"
    assert f"at operation #1 of this model {ways}" in first["first forward"]
    assert "gradient norm of the model" in first["clipping"]


@on_ranks(4, fresh=True)
def test_all_ranks_of_layered_groups_report_the_two_that_diverged() -> None:
    desync.LONGEST_PAUSE_S = 0.1
    model = wrapped(zero3_size=2)
    train(model, 2)
    if dist.get_rank() == 3:
        model.module.pause_s = 0.3  # that alone is no alarm
    train(model)
    if dist.get_rank() == 3:
        model.module.route = [0, 2, 3]
    message = error_of(lambda: train(model, 2))
    # Ranks 1 and 2 both have a group with rank 3, which left the common path.
    assert re.search(r"took different paths: .* rank [12] issued .*, rank 3 issued ", message)


@on_ranks(2, fresh=True)
def test_what_one_rank_froze_alone_is_no_other_path() -> None:
    desync.LONGEST_PAUSE_S = 0.1
    model = wrapped()
    train(model)
    if dist.get_rank() == 1:
        model.module.last.bias.requires_grad_(False)
    message = error_of(lambda: train(model))
    assert "(the ranks' models or requires_grad differ: rank " in message, message
    assert "different operations" not in message, message


def _is_slow(**options) -> tuple[list[float], int]:
    desync.LONGEST_PAUSE_S = 0.1
    models = [wrapped(**options), wrapped(**options)]
    checks = []
    find_out = desync.DesyncDetector._find_out
    desync.DesyncDetector._find_out = lambda self, long: (checks.append(1), find_out(self, long))[1]
    losses = [train(model) for model in models]
    models[0].module.pause_s = 0.3 * (dist.get_rank() == 1)
    models[1].module.pause_s = 0.3 * (dist.get_rank() == 0)
    return losses + [train(model) for model in models], len(checks)


def test_a_slow_rank_and_two_models_are_no_alarm() -> None:
    reference = None
    for losses, checks in run_ranks(2, _is_slow):
        reference = reference or losses
        assert losses == reference
        assert checks, "no thread compared: the pauses are too short to prove anything"


def _waits_beside_torch(folder: Path) -> None:
    """Rank 0 waits in a call of the model, rank 1 in one of torch; then as a launcher does it."""
    model = wrapped()
    if dist.get_rank() == 0:
        logging.getLogger("layerzero").addHandler(logging.FileHandler(folder / "log"))
        (folder / "pid").write_text(str(os.getpid()))
        with model.timeout(seconds=1):
            model.clip_grad_norm_(1.0)
    with pytest.raises(RuntimeError, match="closed"):
        dist.all_reduce(torch.ones(1))
    time.sleep(0.5)  # The first process of a job has failed; the launcher notices it.
    os.kill(int((folder / "pid").read_text()), signal.SIGTERM)


def test_a_rank_that_a_launcher_ends_has_logged_what_it_waited_for(tmp_path: Path) -> None:
    run_ranks(2, _waits_beside_torch, tmp_path, expect_exit={0: -signal.SIGTERM})
    lines = (tmp_path / "log").read_text().splitlines()
    first = next(line for line in lines if "got no answer" in line)
    assert re.match(r"gradient norm of the model \(#\d+\): rank 0 got no answer from rank 1", first)
    assert "nothing arrived within the timeout of 1 s" in first


def _fails_beside(store_path: Path, is_second: bool) -> str | None:
    """Rank 1 leaves a report in the first run, and none in the second."""
    store = dist.FileStore(str(store_path), -1)
    dist.distributed_c10d._get_default_store = lambda: dist.PrefixStore("run", store)
    torch.manual_seed(0)
    model = ZeRO3(nn.Linear(4, 4), timeout=timedelta(seconds=2))
    if dist.get_rank() == 1 and is_second:
        os._exit(7)
    if dist.get_rank() == 1:
        with pytest.raises(CollectiveError):
            model.clip_grad_norm_(1.0)
        os._exit(7)
    with pytest.raises(CollectiveError) as caught:
        model(torch.ones(1, 4))
    assert len(diagnosis.run_names) == 1
    return str(caught.value)


def test_no_report_of_the_run_before_is_shown(tmp_path: Path) -> None:
    """A launcher that starts the ranks again may keep the store."""
    first = run_ranks(2, _fails_beside, tmp_path / "store", False, expect_exit={1: 7})[0]
    assert "rank 1: waits for rank 0 in gradient norm of the model" in first
    second = run_ranks(2, _fails_beside, tmp_path / "store", True, expect_exit={1: 7})[0]
    assert "rank 1: no report" in second, second
