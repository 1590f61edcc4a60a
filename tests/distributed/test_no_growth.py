"""Thousands of steps, and passes that fail among them, leave no memory, thread, file or key."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from layerzero import ZeRO3
from layerzero.optim import AdamW
from layerzero.step.placeholders import WaitingGradient
from tests.harness.fault_at import FaultAt
from tests.harness.models import WIDTH, Block
from tests.harness.ranks import run_ranks

_SHORT = 60
_LONG = 2000


def _counts() -> dict[str, int]:
    gc.collect()
    every = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
    tensors = [each for each in every if not isinstance(each, WaitingGradient)]  # No memory.
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {
        "tensors": len(every),
        "bytes of tensors": sum(storages.values()),
        "objects": len(gc.get_objects()),
        "threads": threading.active_count(),
        "file descriptors": len(os.listdir("/proc/self/fd")),
        "store keys": dist.distributed_c10d._get_default_store().num_keys(),
        "resident MB": resident >> 20,
    }


def _trains(num_steps: int) -> list[dict[str, int]]:
    """Counts after a fifth of the steps, and at the end."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(Block() for _ in range(4)))
    model = ZeRO3(net, auto_wrap_policy={Block}, on_nonfinite="skip")
    optimizer = AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(dist.get_rank())

    def run(syncs: bool = True, at: int = 0) -> None:
        x = torch.randn(2, WIDTH, generator=generator)
        fault = FaultAt(at) if at else contextlib.nullcontext()
        with fault, contextlib.nullcontext() if syncs else model.no_sync():
            model(x).square().sum().backward()

    found = []
    for step in range(num_steps):
        run(syncs=False)
        if step % 4 == 0:
            with pytest.raises(torch.OutOfMemoryError):
                run(syncs=step % 8 == 0, at=1 + step % 53)
        if step % 7 == 0:
            with torch.no_grad():
                model(torch.zeros(1, WIDTH))
        run()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step in (num_steps // 5, num_steps - 1):
            dist.barrier()
            found.append(_counts())
            dist.barrier()
    return found


def _check(found: list[dict[str, int]]) -> dict[str, Any]:
    before, after = found
    # A few objects live a little longer; nothing grows with the number of steps.
    slack = {"objects": 300, "resident MB": 24, "store keys": 8, "tensors": 4}
    slack["bytes of tensors"] = 4096
    grown = {name: (before[name], after[name]) for name in before}
    assert all(after[name] <= before[name] + slack.get(name, 0) for name in before), grown
    return grown


def test_steps_and_failed_passes_leave_nothing(pytestconfig: pytest.Config) -> None:
    num_steps = _LONG if pytestconfig.getoption("--seeds") else _SHORT
    for rank, found in enumerate(run_ranks(2, _trains, num_steps, timeout=900)):
        print(f"rank {rank}, {num_steps} steps: {_check(found)}")
