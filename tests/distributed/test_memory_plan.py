"""`plan_memory` against the storages of real steps on gloo."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from layerzero import BackwardPrefetch, MixedPrecision, ReductionPolicy, plan_memory
from tests.harness.counted_memory import Measured, measure
from tests.harness.planned_models import CASES
from tests.harness.ranks import run_ranks

BFLOAT16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
SETTINGS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "2 ranks": (2, "adamw", {}),
    "bfloat16": (2, "sgd", {"mixed_precision": BFLOAT16, "limit_all_gathers": "400kB"}),
    "kept": (2, "adamw", {"reshard_after_forward": False, "backward_prefetch": None}),
    "layered": (4, "adamw", {"zero3_size": 2, "mixed_precision": BFLOAT16}),
    "replicated": (4, "sgd", {"zero3_size": 2, "outer": "replicate", "deterministic": True}),
    "one hop": (
        4,
        "adamw",
        {"zero3_size": 2, "outer": "shard", "reshard_after_forward": "compute_shard"},
    ),
    "on demand": (2, "sgd", {"forward_prefetch": False, "backward_prefetch": None}),
    "post": (2, "sgd", {"backward_prefetch": BackwardPrefetch.BACKWARD_POST}),
    "whole": (2, "adamw", {"zero3_size": 1, "mixed_precision": BFLOAT16}),
    "several": (2, "sgd", {"reduction": ReductionPolicy(in_flight="1MB"), "forward_prefetch": 2}),
}
SIX = list(SETTINGS)[:6]


def _arguments(case: str, setting: str) -> dict[str, Any]:
    arguments = {**SETTINGS[setting][2], "auto_wrap_policy": CASES[case].units}
    if CASES[case].float32_only:
        arguments.pop("mixed_precision", None)
    if case == "llama":
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer

        arguments["auto_wrap_policy"] = {LlamaDecoderLayer}
    return arguments


Key = tuple[str, str]
"""A model and a setting."""


def _of_rank(
    keys: list[Key], steps: int, in_order: bool = False
) -> dict[Key, tuple[Measured, Any]]:
    """What each takes on this rank; and its plan, if it is this rank's turn to make it."""
    found: dict[Key, tuple[Measured, Any]] = {}
    for case, setting in keys:
        torch.manual_seed(0)
        of_case = CASES[case]
        found[case, setting] = (
            measure(
                of_case.make,
                of_case.batch(),
                SETTINGS[setting][1],
                _arguments(case, setting),
                steps=steps,
                # Without prefetch nothing else waits for it.
                in_order=in_order or setting == "on demand",
            ),
            None,
        )
    # A model on one rank, in all settings: torch remembers what its operators return.
    mine = list(dict.fromkeys(case for case, _ in keys))[dist.get_rank() :: dist.get_world_size()]
    for case, setting in [key for key in keys if key[0] in mine]:
        plan = plan_memory(
            CASES[case].make(),
            world_size=dist.get_world_size(),
            batch=CASES[case].batch(),
            optimizer=SETTINGS[setting][1],
            device="cpu",
            **_arguments(case, setting),
        )
        found[case, setting] = (found[case, setting][0], plan)
    return found


def _ratios(
    keys: list[Key], steps: int, timeout: float, in_order: bool = False
) -> dict[Key, tuple[float, float]]:
    """Planned over measured bytes: at the peak, and between steps."""
    found = {}
    for num_ranks in (2, 4):
        chosen = [key for key in keys if SETTINGS[key[1]][0] == num_ranks]
        given = chosen, steps, in_order
        ranks = run_ranks(num_ranks, _of_rank, *given, timeout=timeout) if chosen else []
        for key in chosen:
            plan = next(of[key][1] for of in ranks if of[key][1] is not None)
            peak = plan.peak_bytes / max(of[key][0].peak for of in ranks)
            found[key] = peak, plan.resting_bytes / max(of[key][0].resting for of in ranks)
            print(f"{key}: peak {peak:.3f}, resting {found[key][1]:.3f} of the measured bytes")
    return found


def _compare(keys: Iterable[Key], timeout: float) -> list[str]:
    """The ratios of planned to measured bytes that are off by more than 5 %."""
    keys = list(keys)
    found = _ratios(keys, 5, timeout)
    # What was exceeded stays exceeded, unless a thread did not get a core in time (`measure`).
    exceeded = [key for key in keys if found[key][0] < 0.95]
    found |= _ratios(exceeded, 20, timeout, in_order=True)
    return [
        f"{key}: peak {peak:.3f}, resting {resting:.3f}"
        for key, (peak, resting) in found.items()
        if abs(peak - 1) > 0.05 or abs(resting - 1) > 0.05
    ]


def test_the_planned_peak_is_the_measured_one() -> None:
    keys = itertools.product(["tower", "tied gpt"], ["2 ranks", "bfloat16", "whole"])
    assert _compare(keys, 60.0) == []


@pytest.mark.soak
def test_the_planned_peak_is_the_measured_one_for_20_models_in_6_settings() -> None:
    has_transformers = importlib.util.find_spec("transformers") is not None
    cases = [case for case in CASES if has_transformers or case != "llama"]
    assert len(cases) >= 20
    assert _compare(itertools.product(cases, SIX), 900.0) == []


@pytest.mark.slow
def test_the_planned_peak_is_the_measured_one_in_more_settings(in_full: bool) -> None:
    """Each setting with one of the models; `make soak`: with all of them."""
    more = [name for name in SETTINGS if name not in SIX]
    cases = ["tower", "odd", "gpt", "adapted"]
    keys = [
        (case, setting)
        for number, setting in enumerate(more)
        for case in (cases if in_full else [cases[number % 4]])
    ]
    assert _compare(keys, 300.0) == []
