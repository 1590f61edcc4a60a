"""layerzero beside the reference: wrap a toy model, train both, compare at every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

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


def assert_trains_alike(
    model: nn.Module,
    reference: nn.Module,
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
        reference: the same model, plain; trained on all of them.
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
    reference_optimizer = OPTIMIZERS[optimizer](reference.parameters())
    losses = []
    for index, step in enumerate(batches):
        own_optimizer.zero_grad()
        reference_optimizer.zero_grad()
        losses.append(run(model, step[rank]))
        expected = backward_of_all_ranks(reference, step, reference_run or run, reduction)
        assert_close(losses[-1], expected[rank], roundings, f"step {index}: loss")
        assert_same_gradients(model, reference, roundings, f"step {index}: gradient of")
        own_optimizer.step()
        reference_optimizer.step()
        assert_same_values(model, reference, roundings, f"after step {index}: parameter")
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
