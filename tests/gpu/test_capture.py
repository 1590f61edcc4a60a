"""Replays of `layerzero.capture` have the bits of eager steps, on a real group of one rank.

tests/distributed/test_graph_capture.py shows the same on the simulated device, with two ranks.
"""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import layerzero
from layerzero import ZeRO3
from layerzero.graph_capture import WARM_UP_CALLS
from layerzero.optim import AdamW
from tests.gpu.mirror_runs import build
from tests.gpu.process import in_process
from tests.harness.models import Block

pytestmark = pytest.mark.gpu

WIDTH, ROWS = 24, 8


def _values(is_captured: bool, is_native: bool, steps: int) -> tuple[list[float], int]:
    device = torch.device("cuda", 0)
    torch.manual_seed(0)
    model = ZeRO3(build(WIDTH, 7, 3).to(device), auto_wrap_policy={Block})
    optimizer: torch.optim.Optimizer
    if is_native:
        optimizer = AdamW(model.parameters(), lr=1e-3)
    else:
        rate = torch.full((), 1e-3, device=device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, capturable=True)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        model.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def evaluate(x: Tensor) -> Tensor:
        with torch.no_grad():
            return model(x).sum()

    sample = torch.zeros(ROWS, WIDTH, device=device)
    train, look = step, evaluate
    if is_captured:
        train, look = layerzero.capture(step, sample), layerzero.capture(evaluate, sample)
    torch.manual_seed(1)
    found = []
    for _ in range(steps):
        found += [train(torch.randn_like(sample)), look(torch.randn_like(sample))]
        schedule.step()
    return torch.stack(found).tolist(), getattr(train, "num_replays", 0)


def both(steps: int) -> list[int]:
    """How many values differ, and how many steps were not replayed, by optimizer."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    counts = []
    for is_native in (True, False):
        eager, _ = _values(False, is_native, steps)
        captured, num_replays = _values(True, is_native, steps)
        counts.append(sum(a != b for a, b in zip(eager, captured, strict=True)))
        counts.append(steps - num_replays)
    return counts


def test_two_orders_take_turns_for_a_thousand_steps() -> None:
    found = in_process("tests.gpu.test_capture:both", 1000, timeout=110)
    assert found == [0, WARM_UP_CALLS] * 2
