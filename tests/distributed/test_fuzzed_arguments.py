"""Fuzzed arguments of ZeRO3, plans and YAML: ValueError, TypeError or NotImplementedError, soon."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn

from layerzero import (
    BackwardPrefetch,
    MixedPrecision,
    OffloadPolicy,
    ShardingPlan,
    ZeRO3,
    shard_with_plan,
)
from tests.harness import mutate
from tests.harness.bounds import MOST_NBYTES, limited_memory, outcome, peak_nbytes
from tests.harness.ranks import run_ranks

FEW = 25
ALLOWED = (ValueError, TypeError, NotImplementedError)
RIGHT: dict[str, tuple[Any, ...]] = {
    "auto_wrap_policy": (None, {nn.Linear}),
    "zero3_size": (None, 1),
    "outer": ("zero1", "replicate"),
    "mixed_precision": (None, MixedPrecision(param_dtype=torch.bfloat16)),
    "forward_prefetch": (True, False, 2),
    "backward_prefetch": (None, BackwardPrefetch.BACKWARD_PRE),
    "limit_all_gathers": (True, 2, "1MB"),
    "reshard_after_forward": (True, False),
    "offload": (None, OffloadPolicy()),
    "sync_module_states": (True, False),
    "device": (None, "cpu"),
    "gradient_reduction": ("mean", "sum"),
    "accumulation": ("auto",),
    "deterministic": (True, False),
    "timeout": (None, timedelta(minutes=1)),
    "ignored_modules": ((),),
    "ignored_parameters": ((),),
    "param_init_fn": (None,),
    "optional_modules": ((),),
    "optional_mean": ("all",),
}
PLAN: dict[str, Any] = {
    "apply_modules": {"inner.*": {"reshard_after_forward": True}, "outer": None},
    "defaults": {"forward_prefetch": 1, "limit_all_gathers": "1MB", "gradient_reduction": "mean"},
    "ignored_modules": [],
    "ignored_parameters": ["outer.bias"],
    "optional": [],
    "hook_modules": [],
    "param_dtype": "bf16",
    "reduce_dtype": "float32",
    "reshard_after_forward": True,
    "cpu_offload": False,
    "act_ckpt": "composable",
    "pregather": False,
    "num_to_forward_prefetch": 1,
}
TEXTS = (
    "!!python/object/apply:os.system ['true']",
    "&a [*a, *a]",
    "{a: 1, a: 2}",
    "\t- x",
    "- -\n -",
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.outer = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.inner:
            x = layer(x)
        return self.outer(x)


def odd_argument(rng: random.Random) -> Any:
    others: tuple[Any, ...] = (
        *(object(), lambda: 3, torch.float32, torch.int8, torch.ones(2), nn.Linear(2, 2), b"x"),
        *(nn.Linear, timedelta(0), timedelta(days=-1), timedelta.max, [None], {None: None}, 1j),
        *(BackwardPrefetch, MixedPrecision, range(3), "bf16", "cuda:99", "meta", "1 XB", "-1MB"),
    )
    return rng.choice(others) if rng.random() < 0.5 else mutate.odd_value(rng)


def build(rng: random.Random, _: Path) -> Callable[[], Any]:
    names = rng.sample(sorted(RIGHT), rng.randrange(1, 6))
    arguments = {name: rng.choice(RIGHT[name]) for name in names}
    for name in rng.sample(names, min(len(names), rng.choice((1, 1, 2)))):
        arguments[name] = odd_argument(rng)
    if rng.random() < 0.1:
        arguments[rng.choice(("reshard_after", "mp_policy", "timeouts", "x" * 3000))] = 1
    return lambda: ZeRO3(Model(), **arguments)


def make_plan(rng: random.Random, _: Path) -> Callable[[], Any]:
    plan = mutate.mutate_json(rng, PLAN)
    return lambda: shard_with_plan(Model(), ShardingPlan.from_dict(plan))


def read_yaml(rng: random.Random, folder: Path) -> Callable[[], Any]:
    path = folder / "plan.yaml"
    text = mutate.dump(mutate.mutate_json(rng, PLAN))
    if rng.random() < 0.4:
        text = mutate.mutate_bytes(rng, text)
    elif rng.random() < 0.2:
        text = rng.choice(TEXTS).encode()
    path.write_bytes(text)
    return lambda: shard_with_plan(Model(), ShardingPlan.from_yaml(path))


def check_cases(seeds: range, folder: Path) -> list[str]:
    problems = []
    ZeRO3(Model())
    before = peak_nbytes()
    with limited_memory():
        for seed in seeds:
            for make in (build, make_plan, read_yaml):
                rng = random.Random(seed)
                attempt = make(rng, folder)
                _, problem = outcome(attempt, ALLOWED)
                if problem is not None:
                    problems.append(f"{make.__name__} {seed}: {problem}")
    if peak_nbytes() - before > MOST_NBYTES:
        problems.append(f"host memory grew by {peak_nbytes() - before} bytes")
    return problems


def test_odd_arguments_and_plans_are_refused(
    tmp_path: Path, seeds_or: Callable[[int], range]
) -> None:
    (problems,) = run_ranks(1, check_cases, seeds_or(FEW), tmp_path, timeout=7200.0)
    assert not problems, "\n".join(problems[:20])
