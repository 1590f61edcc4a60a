"""Checkpoints through ParallelManager: from any of its sizes to any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from layerzero import ParallelManager, ZeRO3
from layerzero.checkpoint import get_model_state_dict, load, save
from tests.distributed.test_parallel_manager import (
    TIMEOUT,
    TP_PLAN,
    Model,
    batches,
)
from tests.harness.checks import assert_bitwise, assert_close_in_float64
from tests.harness.ranks import KeptRanks
from tests.harness.reference import seeded


def _made(seed: int, sizes: dict[str, int]) -> tuple[ZeRO3, torch.optim.Optimizer]:
    model = ParallelManager(**sizes).parallelize(
        seeded(Model, seed), tp_plan=TP_PLAN, timeout=TIMEOUT
    )
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def _train(model: ZeRO3, optimizer: torch.optim.Optimizer) -> Tensor:
    """Three losses, on one batch for all ranks: then it does not matter how many there are."""
    losses = []
    for _ in range(3):
        loss = model(batches(1)[0][0])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def _write(path: str) -> tuple[dict[str, Any], Tensor]:
    model, optimizer = _made(0, {"tp_size": 2})
    _train(model, optimizer)
    save(path, model, optimizer)
    return get_model_state_dict(model, full=True), _train(model, optimizer)


def _read(path: str, many: list[dict[str, int]], full: dict[str, Any], losses: Tensor) -> None:
    for sizes in many:
        model, optimizer = _made(1, sizes)
        load(path, model, optimizer)
        for name, value in get_model_state_dict(model, full=True).items():
            assert_bitwise(value, full[name], f"{sizes}: {name}")
        # All but the first depend on the optimizer's state, too.
        assert_close_in_float64(_train(model, optimizer), losses, f"{sizes}: losses")


@pytest.mark.slow
def test_checkpoints_load_into_any_sizes(tmp_path: Path, ranks: KeptRanks) -> None:
    path = str(tmp_path / "checkpoint")
    full, losses = ranks(4, _write, path, in_float64=True)[0]
    ranks(
        4,
        _read,
        path,
        [{"tp_size": 1}, {"tp_size": 2, "zero3_size": 1}],
        full,
        losses,
        in_float64=True,
    )
    ranks(2, _read, path, [{"tp_size": 2}, {"cp_size": 2}], full, losses, in_float64=True)
