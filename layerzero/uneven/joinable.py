"""`layerzero.join`, and what makes `ZeRO3` a `torch.distributed.algorithms.join.Joinable`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.optim.lr_scheduler import LRScheduler

from layerzero.comm.new_groups import new_group
from layerzero.notices import warn_once
from layerzero.step.root import RootState, root_of
from layerzero.step.unit import get_unit
from layerzero.uneven.running_join import RunningJoin

_GROUP = "_join_group"


def hook_of(
    model: Joinable,
    *,
    optimizers: Iterable[torch.optim.Optimizer] = (),
    divide_by_initial_world_size: bool = True,
) -> JoinHook:
    """Implements `ZeRO3.join_hook`."""
    _ = model.join_process_group  # Made here, where all ranks come.
    averages_active = not divide_by_initial_world_size
    return _Hook(RunningJoin(_root_to_join(model), [*optimizers], averages_active, is_torchs=True))


def group_of(root: RootState) -> dist.ProcessGroup:
    """Implements `ZeRO3.join_process_group`."""
    if _GROUP not in root.__dict__:
        placement = root.placements[0].data_parallel or root.placements[0]
        timeout = placement.shard_group.timeout
        root.__dict__[_GROUP] = new_group(placement.members, "gloo", timeout)
    group: dist.ProcessGroup = root.__dict__[_GROUP]
    return group


class _Hook(JoinHook):
    def __init__(self, join: RunningJoin) -> None:
        self._join = join

    def main_hook(self) -> None:
        self._join.follow_next()

    def post_hook(self, is_last_joiner: bool) -> None:
        self._join.finish(is_last_joiner)
        self._join.leave()

    def __del__(self) -> None:
        self._join.leave()  # After an error, which torch's Join does not report.


@contextmanager
def join(
    model: Any,
    *others: torch.optim.Optimizer | LRScheduler,
    divide_by_initial_world_size: bool = True,
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
        others: every optimizer of the model, and the learning-rate schedulers used inside, in the
            same order on every rank. A scheduler gets the state of those on the last rank to run
            out of batches.
        divide_by_initial_world_size: whether gradients are means over all ranks. False: means over
            those that were not out of batches. (Without effect with gradient_reduction="sum".)

    Raises:
        TypeError, ValueError: an argument is wrong, or ranks have different optimizers.
        NotImplementedError: the model has tensor-parallel parameters or experts, or a gradient
            scaler is used inside.
        RuntimeError: the model is in a join already; or ranks came to different calls.
    """
    if not isinstance(model, Joinable) or get_unit(model) is None:  # type: ignore[arg-type]
        raise TypeError(f"join: expected a ZeRO3 module, got {type(model).__name__}")
    optimizers = [each for each in others if isinstance(each, torch.optim.Optimizer)]
    schedulers = [each for each in others if isinstance(each, LRScheduler)]
    for each in others:
        if not isinstance(each, (torch.optim.Optimizer, LRScheduler)):
            raise TypeError(
                "join: expected optimizers and learning-rate schedulers, got "
                f"{type(each).__module__}.{type(each).__name__}"
            )
    if not schedulers and any("initial_lr" in g for each in optimizers for g in each.param_groups):
        warn_once(
            "join: the optimizer has a learning-rate scheduler; if it steps inside the join, pass "
            "it to layerzero.join, too: on ranks that run out of batches it would fall behind"
        )
    running = RunningJoin(_root_to_join(model), optimizers, not divide_by_initial_world_size)
    is_last = True
    try:
        yield
        while running.follow_next():
            is_last = False
        running.finish(is_last)
        if schedulers:
            _copy_states(schedulers, is_last, model.join_process_group)
    finally:
        running.leave()


def _copy_states(schedulers: list[Any], is_last: bool, group: dist.ProcessGroup) -> None:
    states = [each.state_dict() for each in schedulers] if is_last else None
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, states, group=group)
    last = next(each for each in found if each is not None)
    if states is None:
        for scheduler, state in zip(schedulers, last, strict=True):
            scheduler.load_state_dict(state)


def _root_to_join(model: Joinable) -> RootState:
    """The state of a model that can begin a join; raises for others."""
    unit = get_unit(model)  # type: ignore[arg-type]
    assert unit is not None, "a ZeRO3 module"
    root = root_of(unit)
    if root.units[0] is not unit:
        raise ValueError(
            f"join: {unit.label} is inside another ZeRO3 module; join the outermost one"
        )
    if not root.placements:
        raise ValueError("join: the model has no parameters")
    if root.tensor_parallel_groups or any(each.data_parallel for each in root.placements):
        raise NotImplementedError(
            "join: tensor-parallel models and experts have collectives of their own"
        )
    root.check_between_steps("join: called inside forward or backward")
    if root.join is not None:
        raise RuntimeError("join: the model is inside a join already; leave that one first")
    return root
