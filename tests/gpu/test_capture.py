"""Replays of `layerzero.capture`, and of graphs that a program makes, have the bits of eager steps,
on a real group of one rank.

tests/distributed/test_graph_capture.py shows the same on the simulated device, with two ranks.
"""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import layerzero
from layerzero import ZeRO3
from layerzero.graphs.capture import WARM_UP_CALLS
from layerzero.optim import AdamW
from tests.gpu.mirror import Wires, fake_world
from tests.gpu.mirror_runs import build
from tests.gpu.process import in_process
from tests.harness.captured_steps import OwnGraph
from tests.harness.models import Block

pytestmark = pytest.mark.gpu

WIDTH, ROWS = 24, 8


def _values(by: str, is_native: bool, steps: int) -> tuple[list[float], int]:
    """`by`: "capture" captures the steps, "graph" makes graphs with `torch.cuda.graph`, ""
    neither."""
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
    if by:
        own = functools.partial(OwnGraph, torch.cuda, device)
        train, look = (
            (own if by == "graph" else layerzero.capture)(f, sample) for f in (step, evaluate)
        )
    torch.manual_seed(1)
    found = []
    for _ in range(steps):
        found += [train(torch.randn_like(sample)), look(torch.randn_like(sample))]
        schedule.step()
    return torch.stack(found).tolist(), getattr(train, "num_replays", 0)


def both(steps: int) -> list[int]:
    """How many values differ, and how many steps were not replayed: of native AdamW captured, then
    of torch's captured, and in the program's graph."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    counts = []
    for is_native in (True, False):
        eager, _ = _values("", is_native, steps)
        for by in ("capture",) if is_native else ("capture", "graph"):
            captured, num_replays = _values(by, is_native, steps)
            counts.append(sum(a != b for a, b in zip(eager, captured, strict=True)))
            counts.append(steps - num_replays)
    return counts


def test_two_orders_take_turns_for_a_thousand_steps() -> None:
    found = in_process("tests.gpu.test_capture:both", 1000, timeout=110)
    assert found == [0, WARM_UP_CALLS] * 3


def compiled(device_type: str, steps: int) -> int:
    """How many losses of units that torch compiles into graphs differ from those without graphs."""
    device = torch.device(device_type, 0) if device_type == "cuda" else torch.device("cpu")
    losses: list[list[float]] = []
    with fake_world(3, 8), Wires(device).installed():
        for mode in ("default", "reduce-overhead"):
            torch._dynamo.reset()
            model = ZeRO3(build(WIDTH, 7, 3).to(device), auto_wrap_policy={Block}, arena=True)
            model.compile(mode=mode)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
            torch.manual_seed(1)
            found = []
            for _ in range(steps):
                loss = model(torch.randn(ROWS, WIDTH, device=device)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.detach().clone())
            losses.append(torch.stack(found).tolist())
    return sum(a != b for a, b in zip(*losses, strict=True))


def test_graphs_of_torch_compile_have_the_bits_of_compiled_units_without_graphs() -> None:
    assert in_process("tests.gpu.test_capture:compiled", "cuda", 50, timeout=110) == 0
