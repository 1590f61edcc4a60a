"""`plan_memory` with arguments of one feature each, against the storages of real steps on gloo."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from layerzero import MixedPrecision, plan_memory
from tests.harness.counted_memory import measure
from tests.harness.planned_models import CASES, Batch
from tests.harness.ranks import run_ranks

BFLOAT16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Wish(NamedTuple):
    """What is measured on every rank, and planned on one."""

    make: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    optimizer: str
    arguments: Callable[[nn.Module], dict[str, Any]]
    """Of `ZeRO3`, for the module that `make` has returned."""
    planned: Callable[[nn.Module], dict[str, Any]] | None = None
    """Of `plan_memory`, where they differ."""


def _of_rank(names: list[str]) -> dict[str, tuple[int, int, Any]]:
    """Measured bytes (between steps, at the peak) of each wish; and the plan, on one rank."""
    found: dict[str, tuple[int, int, Any]] = {}
    for place, name in enumerate(names):
        wish = WISHES[name]
        torch.manual_seed(0)
        module = wish.make()
        arguments = wish.arguments(module)
        measured = measure(partial(_given, module), wish.batch(), wish.optimizer, arguments, 8)
        plan = None
        if place % dist.get_world_size() == dist.get_rank():
            module = wish.make()
            plan = plan_memory(
                module,
                world_size=dist.get_world_size(),
                batch=wish.batch(),
                optimizer=wish.optimizer,
                device="cpu",
                **(wish.planned or wish.arguments)(module),
            )
        found[name] = (*measured, plan)
    return found


def _given(module: nn.Module) -> nn.Module:
    return module


def _compare(num_ranks: int, names: list[str]) -> list[str]:
    """The wishes whose plan is off by more than 5 %."""
    ranks = run_ranks(num_ranks, _of_rank, names, timeout=120.0)
    bad = []
    for name in names:
        plan = next(each[name][2] for each in ranks if each[name][2] is not None)
        resting, peak = (max(each[name][place] for each in ranks) for place in (0, 1))
        ratios = plan.resting_bytes / resting, plan.peak_bytes / peak
        text = f"{name}, {num_ranks} ranks: resting {ratios[0]:.3f}, peak {ratios[1]:.3f}"
        print(text, plan.peak_moment, plan.peak_unit)
        bad += [text] * any(abs(ratio - 1) > 0.05 for ratio in ratios)
    return bad


def _verified(case: str, optimizer: str, **of: Any) -> Wish:
    arguments = {**of, "auto_wrap_policy": CASES[case].units}
    return Wish(CASES[case].make, CASES[case].batch, optimizer, lambda _: arguments)


WISHES = {
    "verified": _verified("tower", "adamw", verify="always"),
    "sampled": _verified("tied gpt", "sgd", verify="sampled", mixed_precision=BFLOAT16),
    "replicated": _verified("odd", "sgd", verify="always", zero3_size=1, outer="replicate"),
}
FAST = ["sampled"]


def test_the_planned_peak_is_the_measured_one() -> None:
    assert _compare(2, FAST) == []


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_planned_peak_is_the_measured_one_in_more_shapes(num_ranks: int) -> None:
    assert _compare(num_ranks, list(WISHES)) == []
