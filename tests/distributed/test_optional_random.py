"""Random models with optional regions, whose ranks take different ways, train like one process.

Compared to the bit on two ranks, with one backward for each delivery of gradients, without clipping
and where no region has two places. Else in float64, because sums have another order: of more than
two ranks some may reach a region later in backward than the others, and it is reduced twice;
layered groups add in two hops, `no_sync` before or after the ranks' sum; a clipped gradient has the
norm's rounding in it. `.grad` is None exactly where no rank had a gradient, and what hangs exceeds
the timeout.
"""

import random
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.harness.checks import named
from tests.harness.optional_runs import (
    SIMPLE,
    STEPS,
    Run,
    random_batches,
    random_model,
    random_plan,
    random_settings,
)
from tests.harness.plain_backend import make_plain_group
from tests.harness.simulated_device import simulated_device

TIMEOUT = timedelta(seconds=25)


def _train(seed: int, **given: Any) -> None:
    rng, world_size = random.Random(seed), dist.get_world_size()
    torch.manual_seed(seed)
    model = random_model(rng)
    settings = random_settings(rng, world_size) | given
    follows_order = (
        world_size == 2 and "process_group" not in settings and not model.has_shared_regions
    )
    is_simple = rng.random() < 0.5
    dtype = torch.float32 if is_simple and follows_order else torch.float64
    run = Run(model, dtype, timeout=TIMEOUT, **settings)
    draw = random_batches(rng, dtype)
    for _ in range(STEPS):
        plan = SIMPLE if is_simple else random_plan(rng)
        between = rng.choice(["nothing", "nothing", "evaluate", "freeze", "raise"])
        if between == "evaluate":
            run.evaluate(draw(world_size))
        elif between == "freeze":
            run.toggle(rng)
        elif between == "raise":
            run.fail(draw(world_size))
        samples = [draw(world_size) for _ in range(plan.num_forwards)]
        run.step(plan, samples, exact=is_simple and follows_order)


def _train_seeds(seeds: range, group: str) -> None:
    """`group`: "named"; "plain": messages carry no name; "device": that, and on a device."""
    given = {} if group == "named" else {"process_group": make_plain_group(TIMEOUT)}
    for seed in seeds:
        with named(f"seed {seed}"):
            if group != "device":
                _train(seed, **given)
                continue
            with simulated_device(on_current_stream=seed % 2 == 1) as device:
                _train(seed, **given)
                assert device.findings == []


@pytest.mark.parametrize(
    ("world_size", "seeds", "group"),
    [
        (2, range(4), "named"),
        pytest.param(2, range(4, 18), "named", marks=pytest.mark.soak),
        (2, range(3024, 3025), "plain"),
        pytest.param(2, range(4000, 4002), "device", marks=pytest.mark.slow),
        (3, range(1000, 1002), "named"),
        pytest.param(3, range(30022, 30023), "named", marks=pytest.mark.slow),
        pytest.param(4, range(40059, 40061), "named", marks=pytest.mark.slow),
        pytest.param(4, range(41061, 41062), "named", marks=pytest.mark.slow),
    ],
)
def test_random_regions_train_like_one_process(
    world_size: int, seeds: range, group: str, pytestconfig: pytest.Config, ranks: Any
) -> None:
    """As many seeds as `--seeds` says, from the same first one."""
    stop = seeds.start + (pytestconfig.getoption("--seeds") or len(seeds))
    for first in range(seeds.start, stop, 10):
        some = range(first, min(first + 10, stop))
        ranks(world_size, _train_seeds, some, group, timeout=240)
