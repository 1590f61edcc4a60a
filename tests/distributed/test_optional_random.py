"""Random models with optional regions, whose ranks take different ways, train like one process.

Compared to the bit on two ranks, with one backward for each delivery of gradients, without clipping
and where no region has two places. Else in float64, because sums have another order: of more than
two ranks some may reach a region later in backward than the others, and it is reduced twice;
layered groups add in two hops, `no_sync` before or after the ranks' sum; a clipped gradient has the
norm's rounding in it. `.grad` is None exactly where no rank had a gradient, and what hangs exceeds
the timeout.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from layerzero import MixedPrecision
from tests.harness.optional_runs import (
    SIMPLE,
    STEPS,
    Batches,
    Run,
    random_model,
    random_plan,
    random_settings,
)
from tests.harness.plain_backend import make_plain_group
from tests.harness.ranks import run_ranks
from tests.harness.simulated_device import simulated_device

TIMEOUT = timedelta(seconds=25)


def _train(seed: int, **given: Any) -> None:
    try:
        _run(random.Random(seed), seed, given)
    except Exception as error:
        error.add_note(f"seed {seed}")
        raise


def _run(rng: random.Random, seed: int, given: dict[str, Any]) -> None:
    world_size = dist.get_world_size()
    torch.manual_seed(seed)
    model = random_model(rng)
    settings = random_settings(rng, world_size) | given
    follows_order = (
        world_size == 2 and "process_group" not in settings and not model.has_shared_regions
    )
    is_low = follows_order and rng.random() < 0.15
    if is_low:
        low, full = torch.bfloat16, torch.float32
        settings["mixed_precision"] = MixedPrecision(param_dtype=low, reduce_dtype=full)
    is_simple = is_low or rng.random() < 0.5
    dtype = torch.float32 if is_simple and follows_order else torch.float64
    run = Run(model, dtype, timeout=TIMEOUT, **settings)
    batches = Batches(rng, run.twin, dtype)
    for _ in range(STEPS):
        plan = SIMPLE if is_simple else random_plan(rng)
        between = rng.choice(["nothing", "nothing", "evaluate", "freeze", "raise"])
        if between == "evaluate":
            run.evaluate(batches.draw(world_size))
        elif between == "freeze":
            run.toggle(rng)
        elif between == "raise":
            run.fail(batches.draw(world_size))
        samples = [batches.draw(world_size) for _ in range(plan.num_forwards)]
        run.step(plan, samples, exact=is_simple and follows_order)


def _train_seeds(seeds: range) -> None:
    for seed in seeds:
        _train(seed)


def _on(
    config: pytest.Config, world_size: int, train: Callable[[range], None], seeds: range
) -> None:
    """As many seeds as `--seeds` says, from the same first one; a few to a group of ranks."""
    stop = seeds.start + (config.getoption("--seeds") or len(seeds))
    for first in range(seeds.start, stop, 10):
        run_ranks(world_size, train, range(first, min(first + 10, stop)), timeout=240)


@pytest.mark.parametrize(("world_size", "seeds"), [(2, range(4)), (3, range(1000, 1002))])
def test_random_regions_train_like_one_process(
    world_size: int, seeds: range, pytestconfig: pytest.Config
) -> None:
    _on(pytestconfig, world_size, _train_seeds, seeds)


@pytest.mark.soak
def test_more_random_regions_train_like_one_process(pytestconfig: pytest.Config) -> None:
    _on(pytestconfig, 2, _train_seeds, range(4, 18))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "seeds"),
    [
        (3, range(1002, 1004)),
        (3, range(30020, 30021)),
        (4, range(40050, 40053)),
        (4, range(41036, 41038)),
    ],
)
def test_random_regions_on_more_ranks_train_like_one_process(
    world_size: int, seeds: range, pytestconfig: pytest.Config
) -> None:
    _on(pytestconfig, world_size, _train_seeds, seeds)


def _train_without_names(seeds: range) -> None:
    group = make_plain_group(TIMEOUT)
    for seed in seeds:
        _train(seed, process_group=group)


def test_they_do_where_messages_carry_no_name(pytestconfig: pytest.Config) -> None:
    _on(pytestconfig, 2, _train_without_names, range(3000, 3002))


def _train_on_a_device(seeds: range) -> None:
    group = make_plain_group(TIMEOUT)
    for seed in seeds:
        with simulated_device(on_current_stream=seed % 2 == 1) as device:
            _train(seed, process_group=group)
            assert device.findings == [], f"seed {seed}"


@pytest.mark.slow
def test_their_accesses_are_ordered_on_a_device(pytestconfig: pytest.Config) -> None:
    _on(pytestconfig, 2, _train_on_a_device, range(4000, 4003))
