"""A ledger on the simulated device: its events add no race, and no wait of the host in a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import layerzero
from tests.harness.checks import check_ledger
from tests.harness.fake_ranks import run_fake_ranks
from tests.harness.simulated_device import simulated_device
from tests.harness.stream_uses import (
    HOST_USES,
    LAYERED,
    OFFLOADED,
    SETTINGS,
    USES,
    accumulation,
    plain_steps,
    train,
    wrapped,
)


def _recorded(
    settings: dict[str, dict[str, Any]], uses: list[Callable[..., None]]
) -> dict[str, list[str]]:
    """What the simulated device found, by settings and use."""
    found = {}
    for name, arguments in settings.items():
        for use in uses:
            with simulated_device(on_current_stream=use is not uses[0]) as device:
                model = wrapped(**arguments)
                train(model, 2)
                with layerzero.ledger(model) as ledger:
                    use(model)
                rows = ledger.units
                check_ledger(ledger)
                if "whole" not in name:
                    assert all(row.gather_ms > 0 and row.gather_bytes > 0 for row in rows)
                assert all(row.reduce_ms > 0 and row.reduce_bytes > 0 for row in rows)
                device.host_waits.clear()
                if use is plain_steps:
                    with layerzero.ledger(model):
                        device.host_waits.clear()
                        train(model, 2, torch.optim.AdamW)
                        waits = sorted(set(map(str, device.host_waits)))
                    assert waits == [], (name, waits)
                del model
            if device.findings:
                found[f"{name}, {use.__name__}"] = device.findings
    return found


def test_a_ledger_orders_all_accesses_and_does_not_block_the_host() -> None:
    few = {"default": SETTINGS["default"]}
    for found in run_fake_ranks((0, 1), 2, _recorded, few, [plain_steps, accumulation]):
        assert found == {}


@pytest.mark.slow
def test_a_ledger_orders_all_accesses_in_every_mode(pytestconfig: pytest.Config) -> None:
    # With micro-batches a step has all that a plain one has; `make soak` runs both.
    two = [plain_steps, accumulation] if pytestconfig.getoption("--seeds") else [accumulation]
    sweeps = [
        (2, SETTINGS, two),
        (2, {"default": SETTINGS["default"]}, USES),
        (4, {name: each for name, each in LAYERED.items() if each["zero3_size"] == 2}, two),
        (2, {name: each for name, each in LAYERED.items() if each["zero3_size"] == 1}, two),
        (2, OFFLOADED, [accumulation, HOST_USES[2]]),
    ]
    for world_size, settings, uses in sweeps:
        # Records of other ranks are missing; with two hops only the first needs none.
        ranks = (0, 1) if world_size == 2 else (0,)
        for found in run_fake_ranks(ranks, world_size, _recorded, settings, uses, timeout=300):
            assert found == {}
