"""join: a context around a training loop in which ranks have uneven numbers of batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Joinable
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from layerzero.notices import warn_once
from layerzero.optim.scaler import GradScaler
from layerzero.step.unit import get_unit
from layerzero.uneven.joinable import enter


@contextmanager
def join(
    model: Any,
    *others: torch.optim.Optimizer | LRScheduler | ReduceLROnPlateau | GradScaler,
    divide_by_initial_world_size: bool = True,
    throw_on_early_termination: bool = False,
) -> Iterator[None]:
    """A context around a loop over batches, of which ranks may have different numbers.

    A rank that leaves the loop early takes part, at the end of the context, in what the others
    still run: forward and backward with nothing of its own, `model.clip_grad_norm_`,
    `model.reduce_gradients`, and the steps of its optimizers, with the options (learning rate and
    so on) of the others. All ranks leave the context together, with the same number of steps.
    Inside one step, too, ranks may have different numbers of micro-batches, all but the last in
    `no_sync`. Collective at entry and exit, and blocks the host before each forward, backward,
    clipping and step.

    Args:
        model: the outermost `ZeRO3` module.
        others: every optimizer of the model, and the learning-rate schedulers and gradient scalers
            (`layerzero.GradScaler`) used inside, in the same order on every rank. A scheduler gets
            the state of those on the last rank to run out of batches.
        divide_by_initial_world_size: whether gradients are means over all ranks. False: means over
            those that were not out of batches. (Without effect with gradient_reduction="sum".)
        throw_on_early_termination: raise on all ranks as soon as one runs out of batches.

    Raises:
        TypeError, ValueError: an argument is wrong, or ranks have different optimizers.
        NotImplementedError: the model has tensor-parallel parameters or experts, or a gradient
            scaler that was not passed is used inside.
        RuntimeError: the model is in a join already; a rank raised inside (then on all others);
            ranks came to different calls; or `throw_on_early_termination`.
    """
    if not isinstance(model, Joinable) or get_unit(model) is None:  # type: ignore[arg-type]
        raise TypeError(f"join: expected a ZeRO3 module, got {type(model).__name__}")
    optimizers = [each for each in others if isinstance(each, torch.optim.Optimizer)]
    schedulers = [each for each in others if isinstance(each, (LRScheduler, ReduceLROnPlateau))]
    scalers = [each for each in others if isinstance(each, GradScaler)]
    if len(optimizers) + len(schedulers) + len(scalers) < len(others):
        known = (*optimizers, *schedulers, *scalers)
        wrong = next(each for each in others if not any(each is k for k in known))
        raise TypeError(
            "join: expected optimizers, learning-rate schedulers and layerzero.GradScaler, got "
            f"{type(wrong).__module__}.{type(wrong).__name__}"
        )
    if not schedulers and any("initial_lr" in g for each in optimizers for g in each.param_groups):
        warn_once(
            "join without schedulers",
            "join: the optimizer has a learning-rate scheduler; if it steps inside the join, pass "
            "it to layerzero.join, too: on ranks that run out of batches it would fall behind",
            stacklevel=4,
        )
    running = enter(
        model,
        optimizers,
        scalers,
        averages_active=not divide_by_initial_world_size,
        throws=throw_on_early_termination,
    )
    is_last = True
    try:
        yield
        while running.follow_next():
            is_last = False
        running.finish(is_last)
        if schedulers:
            _copy_states(schedulers, is_last, model.join_process_group)
    except BaseException as error:
        running.raise_everywhere(error)
        raise
    finally:
        running.leave()


def _copy_states(schedulers: list[Any], is_last: bool, group: dist.ProcessGroup) -> None:
    """Give each scheduler the state that it has on a rank which ran all steps."""
    states = [each.state_dict() for each in schedulers] if is_last else None
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, states, group=group)
    last = next(each for each in found if each is not None)
    if states is None:
        for scheduler, state in zip(schedulers, last, strict=True):
            scheduler.load_state_dict(state)
