"""Random models under random settings train like one process that sees all batches.

In float64, so that the order of sums does not matter: what differs is an error.
"""

import contextlib
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from layerzero import OffloadPolicy, ZeRO3
from tests.harness.checks import assert_within, named
from tests.harness.plain_backend import make_plain_group
from tests.harness.random_models import Branches
from tests.harness.random_programs import ACTIONS, STEPS, Run
from tests.harness.ranks import run_ranks
from tests.harness.reference import Terms
from tests.harness.simulated_device import simulated_device


class _UnderAutocast(Run):
    def train_under_autocast(self, others: list[str]) -> None:
        """From equal weights in each step, because a rounding in a weight may become one in a cast.

        Both compute the same bits then, apart from the order of sums in float32.
        """
        if self._steps_in_backward:
            self._model.step_in_backward(None)  # Each step has several backwards.
            self._steps_in_backward = False
        for _ in range(STEPS):
            self._zero_grad()
            getattr(self, f"_{self.rng.choice(others)}", lambda: None)()
            with self._model.summon_full_params(writeback=False), torch.no_grad():
                full = dict(self._model.named_parameters())
                for name, parameter in self._twin.named_parameters():
                    parameter.copy_(full[name])
            for parameter in (*self._model.parameters(), *self._twin.parameters()):
                parameter.grad = None
            self._step_under_autocast()
            self._ran.clear()
            for optimizer in self._optimizers:
                optimizer.step()

    def _step_under_autocast(self) -> None:
        Branches.uses_all = self.rng.random() < 0.7
        passes = self.rng.choices(["no_grad", "wait", "backward", "no_sync"], k=3)
        batches = [self._batches() for _ in range(len(passes) + 1)]
        rank = dist.get_rank()
        _run_under_autocast(self._model, passes, [each[rank] for each in batches], 1)
        terms = Terms()
        with terms.collected(list(self._twin.parameters()), 1.0):
            for index in range(dist.get_world_size()):
                parts = [each[index] for each in batches]
                _run_under_autocast(self._twin, passes, parts, self._divisor)
        bounds = terms.bounds(self._twin)
        sharded_params = dict(self._model.named_parameters())
        for name, parameter in self._twin.named_parameters():
            gradient = sharded_params[name].grad
            expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            if gradient is None:
                assert not expected.any(), f"{name} has no gradient after {passes}"
                continue
            own = slice(*sharded_params[name].layerzero.range)
            bound = torch.as_tensor(bounds[name]).expand_as(expected).reshape(-1)[own]
            expected = expected.view(-1)[own]
            assert_within(gradient.reshape(-1), expected, bound, f"{name} after {passes}")


def _run_under_autocast(
    model: nn.Module, passes: list[str], batches: list[torch.Tensor], divisor: int
) -> None:
    """Forwards and backwards inside one autocast, the last of which synchronizes gradients.

    Units cast a weight at each use, as plain torch does without its cache.
    """
    waiting: list[torch.Tensor] = []
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=isinstance(model, ZeRO3)):
        for way, batch in zip([*passes, "backward"], batches, strict=True):
            if way == "no_grad":
                with torch.no_grad():
                    model(batch)
                continue
            loss = model(batch).float().square().mean() / divisor
            waiting += [loss] if loss.requires_grad else []
            if way == "wait" or not waiting:
                continue
            adds_up = way == "no_sync" and isinstance(model, ZeRO3)
            with model.no_sync() if adds_up else contextlib.nullcontext():
                torch.stack(waiting).sum().backward()
            waiting = []


def _run_on(
    config: pytest.Config, world_size: int, train: Callable[[range], None], seeds: range
) -> None:
    """As many seeds as `--seeds` says, from the same first one; a few to a group of ranks."""
    stop = seeds.start + (config.getoption("--seeds") or len(seeds))
    for first in range(seeds.start, stop, 16):
        run_ranks(world_size, train, range(first, min(first + 16, stop)), timeout=240)


def _train_under_autocast(seeds: range) -> None:
    for seed in seeds:
        with named(seed):
            # In float32 native and whole-tensor optimizers have nothing to compare with.
            run = _UnderAutocast(seed, torch.float32, memory_budget=None, verify=None)
            run.train_under_autocast(["nothing", "raise", "freeze"])


def test_random_models_under_autocast_train_as_one_process(
    pytestconfig: pytest.Config,
) -> None:
    _run_on(pytestconfig, 2, _train_under_autocast, range(300, 305))


def _train(seeds: range) -> None:
    for seed in seeds:
        run = Run(seed)
        try:
            run.train(ACTIONS)
        except Exception as error:
            error.add_note(f"seed {seed}: {run.log}")
            raise


@pytest.mark.parametrize(("world_size", "seeds"), [(2, range(8)), (4, range(100, 104))])
def test_random_models_train_like_one_process(
    world_size: int, seeds: range, pytestconfig: pytest.Config
) -> None:
    _run_on(pytestconfig, world_size, _train, seeds)


def _train_on_a_device(seeds: range) -> None:
    group = make_plain_group(timedelta(seconds=60))
    for seed in seeds:
        with named(seed), simulated_device() as device:
            offload = OffloadPolicy(params=seed % 4 < 2, grads=seed % 2 == 0)
            Run(
                seed,
                start="given",
                process_group=group,
                offload=offload,
                memory_budget=None,
                arena=False,
            ).train(["nothing", "raise", "freeze"])
            assert device.findings == []


def test_their_accesses_are_ordered_on_a_device(pytestconfig: pytest.Config) -> None:
    _run_on(pytestconfig, 2, _train_on_a_device, range(200, 204))
