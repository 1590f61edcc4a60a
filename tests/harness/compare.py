"""layerzero beside the reference: wrap a toy model, train both, compare at every step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn

from layerzero import ZeRO3
from tests.harness.checks import assert_close, assert_same_parameters
from tests.harness.models import Case
from tests.harness.reference import (
    OPTIMIZERS,
    RunFn,
    backward_of_all_ranks,
    forward_backward,
    full_gradients,
    full_parameters,
    seeded,
)


def sharded(case: Case, **options: Any) -> ZeRO3:
    """The case's model from seed 0, its units wrapped. Collective over the default group."""
    return zero3(case.build, *case.units, **options)


def zero3(build: Callable[[], nn.Module], *units: type[nn.Module], **options: Any) -> ZeRO3:
    """A model built from seed 0, with `units` (or `auto_wrap_policy`) wrapped.

    Its timeout is below that of a test, so that ranks that wait for each other tell what for.
    """
    options.setdefault("auto_wrap_policy", set(units) or None)
    options.setdefault("timeout", timedelta(seconds=25))
    return ZeRO3(seeded(build), **options)


def roundings_of(world_size: int, case: Case | None = None) -> int:
    """What `assert_close` may forgive, where sums over ranks may run in any order.

    Two terms have one order, so two ranks are bitwise. More: each of a few steps adds an error of
    (world_size - 1) roundings to gradients, which cancellation makes larger.
    """
    return 0 if world_size <= 2 and (case is None or case.is_exact) else 64


class Step(NamedTuple):
    """What one step of the reference gave."""

    losses: list[Tensor]
    """Of each rank's batch."""
    gradients: dict[str, Tensor | None]
    parameters: dict[str, Tensor]
    """After the step."""


def steps_of(
    reference: nn.Module,
    batches: Sequence[Sequence[Any]],
    optimizer: str = "sgd_momentum",
    run: RunFn = forward_backward,
    reduction: str = "mean",
) -> Iterator[Step]:
    """Train a plain module; arguments as those of `assert_trains_alike`, which takes a list of them
    where several models have one reference."""
    own_optimizer = OPTIMIZERS[optimizer](reference.parameters())
    for step in batches:
        own_optimizer.zero_grad()
        losses = backward_of_all_ranks(reference, step, run, reduction)
        gradients = full_gradients(reference)
        own_optimizer.step()
        yield Step(losses, gradients, full_parameters(reference))


def assert_trains_alike(
    model: nn.Module,
    reference: nn.Module | Sequence[Step],
    batches: Sequence[Sequence[Any]],
    optimizer: str = "sgd_momentum",
    run: RunFn = forward_backward,
    reference_run: RunFn | None = None,
    roundings: int | None = None,
    reduction: str = "mean",
    group: dist.ProcessGroup | None = None,
) -> list[Tensor]:
    """Train both; each loss, gradient and parameter is compared at each step. Collective.

    Args:
        model: wrapped; trained on this rank's part of `batches` [step][rank].
        reference: the same model, plain; trained on all of them. Or what `steps_of` gave for it.
        optimizer: a name in `OPTIMIZERS`.
        run: forward and backward of one batch, see `backward_of_all_ranks`.
        reference_run: of the reference, where it differs.
        roundings: as in `assert_close`; None: those of the number of ranks.
        reduction: what `gradient_reduction` the model has.
        group: the ranks that share the model, in the order of `batches`; None: all.

    Returns:
        This rank's losses.
    """
    if roundings is None:
        roundings = roundings_of(dist.get_world_size(group))
    rank = dist.get_rank(group)
    own_optimizer = OPTIMIZERS[optimizer](model.parameters())
    losses = []
    expected: Iterator[Step]
    if isinstance(reference, nn.Module):
        expected = steps_of(reference, batches, optimizer, reference_run or run, reduction)
    else:
        assert len(reference) == len(batches)
        expected = iter(reference)
    for index, step in enumerate(batches):
        own_optimizer.zero_grad()
        losses.append(run(model, step[rank]))
        truth = next(expected)
        assert_close(losses[-1], truth.losses[rank], roundings, f"step {index}: loss")
        what = f"step {index}: gradient of"
        assert_same_parameters(full_gradients(model), truth.gradients, roundings, what)
        own_optimizer.step()
        what = f"after step {index}: parameter"
        assert_same_parameters(full_parameters(model), truth.parameters, roundings, what)
    return losses


def assert_same_gradients(
    model: nn.Module, reference: nn.Module, roundings: int = 0, what: str = "gradient of"
) -> None:
    """Collective. None where the reference has None."""
    assert_same_parameters(full_gradients(model), full_gradients(reference), roundings, what)


def assert_same_values(
    model: nn.Module, reference: nn.Module, roundings: int = 0, what: str = "parameter"
) -> None:
    """Collective. The full parameters, by name."""
    assert_same_parameters(full_parameters(model), full_parameters(reference), roundings, what)
