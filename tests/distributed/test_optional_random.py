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

from tests.harness import optional_runs
from tests.harness.plain_backend import make_plain_group
from tests.harness.simulated_device import simulated_device

TIMEOUT = timedelta(seconds=25)


def _train(seed: int, **given: Any) -> None:
    rng, world_size = random.Random(seed), dist.get_world_size()
    torch.manual_seed(seed)
    model = optional_runs.random_model(rng)
    settings = optional_runs.random_settings(rng, world_size) | given
    follows_order = (
        world_size == 2 and "process_group" not in settings and not model.has_shared_regions
    )
    is_simple = rng.random() < 0.5
    dtype = torch.float32 if is_simple and follows_order else torch.float64
    run = optional_runs.Run(model, dtype, timeout=TIMEOUT, **settings)
    draw = optional_runs.random_batches(rng, dtype)
    for _ in range(optional_runs.STEPS):
        plan = optional_runs.SIMPLE if is_simple else optional_runs.random_plan(rng)
        between = rng.choice(["nothing", "nothing", "evaluate", "freeze", "raise"])
        if between == "evaluate":
            run.evaluate(draw(world_size))
        elif between == "freeze":
            run.toggle(rng)
        elif between == "raise":
            run.fail(draw(world_size))
        samples = [draw(world_size) for _ in range(plan.num_forwards)]
        run.step(plan, samples, exact=is_simple and follows_order)


def _train_in(seed: int, group: str) -> None:
    """`group`: "named"; "plain": messages carry no name; "device": that, and on a device."""
    given = {} if group == "named" else {"process_group": make_plain_group(TIMEOUT)}
    if group != "device":
        _train(seed, **given)
        return
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
    world_size: int, seeds: range, group: str, on_each_seed: Any
) -> None:
    on_each_seed(world_size, _train_in, seeds, group)
