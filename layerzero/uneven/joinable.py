"""What makes `ZeRO3` a `torch.distributed.algorithms.join.Joinable`, and how a join begins."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from layerzero.comm.new_groups import new_group
from layerzero.step.root import RootState, root_of
from layerzero.step.unit import Unit, get_unit

if TYPE_CHECKING:
    from layerzero.optim.scaler import GradScaler
    from layerzero.uneven.running_join import RunningJoin

_GROUP, _EXCHANGE = "_join_group", "_join_exchange"


def hook_of(
    model: Joinable,
    *,
    optimizers: Iterable[torch.optim.Optimizer] = (),
    divide_by_initial_world_size: bool = True,
) -> JoinHook:
    """Implements `ZeRO3.join_hook`."""
    model_ref = weakref.ref(model)

    def notify() -> Any:
        return Join.notify_join_context(model_ref())  # type: ignore[arg-type]

    def is_enabled() -> bool:
        joinable = model_ref()
        return joinable is not None and _takes_part(joinable)

    _ = model.join_process_group  # Made here, where all ranks come.
    averages = not divide_by_initial_world_size
    join = enter(model, [*optimizers], (), averages, notify=notify, is_enabled=is_enabled)
    hook = _Hook(join)
    join.state.hook = weakref.ref(hook)
    return hook


def group_of(root: RootState) -> dist.ProcessGroup:
    """Implements `ZeRO3.join_process_group`."""
    if _GROUP not in root.__dict__:
        shard = next(h for unit in root.units for h in unit.handles).placement
        timeout = shard.shard_group.timeout
        root.__dict__[_GROUP] = new_group(
            shard.members, "gloo", timeout, description="layerzero join"
        )
    group: dist.ProcessGroup = root.__dict__[_GROUP]
    return group


class _Hook(JoinHook):
    def __init__(self, join: RunningJoin) -> None:
        self._join = join
        self._is_first = True

    def main_hook(self) -> None:
        if self._is_first:
            # Torch counts calls of this, of which a step has several.
            warnings.filterwarnings("ignore", message="Detected uneven input skew")
            self._is_first = False
        self._join.follow_next()

    def post_hook(self, is_last_joiner: bool) -> None:
        self._join.finish(is_last_joiner)
        self._join.leave()


def enter(
    model: Joinable,
    optimizers: Sequence[torch.optim.Optimizer],
    scalers: Sequence[GradScaler],
    averages_active: bool,
    **options: Any,
) -> RunningJoin:
    """Begin a join; for the arguments see `JoinState`. Collective.

    Raises:
        ValueError, TypeError, NotImplementedError: the model or an optimizer cannot join.
        RuntimeError: the model is inside another join.
    """
    from layerzero.optional.optional_units import exchange_of
    from layerzero.uneven.optimizers import JoinedOptimizers
    from layerzero.uneven.running_join import RunningJoin
    from layerzero.uneven.scalers import JoinedScalers
    from layerzero.uneven.state import JoinState

    unit = get_unit(model)  # type: ignore[arg-type]
    assert unit is not None, "a ZeRO3 module"
    root = root_of(unit)
    _check(unit, root, optimizers)
    if root.join is not None:
        if root.join.is_open:
            raise RuntimeError("join: the model is inside a join already; leave that one first")
        root.join.leave()  # An error ended that one.
    joined = JoinedOptimizers(optimizers)
    state = JoinState(
        optimizers=joined,
        scalers=JoinedScalers(scalers, joined),
        averages_active=averages_active,
        **options,
    )
    if _EXCHANGE not in root.__dict__:
        root.__dict__[_EXCHANGE] = exchange_of(root)
    return RunningJoin(root, state, root.__dict__[_EXCHANGE])


def _takes_part(model: Joinable) -> bool:
    """Whether the model is in an enabled join.

    Raises:
        NotImplementedError: it is not the first of several.
    """
    config = model._join_config
    if config.enable and not config.is_first_joinable:
        raise NotImplementedError(
            "join: several models in one join; join the one whose batches are uneven, or make them "
            "one module"
        )
    return bool(config.enable)


def _check(unit: Unit, root: RootState, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"join: expected optimizers, got {type(optimizer).__name__}")
    if root.units[0] is not unit:
        raise ValueError(
            f"join: {unit.label} is inside another ZeRO3 module; join the outermost one"
        )
    handles = [handle for unit in root.units for handle in unit.handles]
    if not handles:
        raise ValueError("join: the model has no parameters")
    if root.tensor_parallel_groups or any(h.placement.data_parallel for h in handles):
        raise NotImplementedError(
            "join: not for tensor-parallel models or experts, whose own collectives a rank without "
            "batches cannot take part in"
        )
    root.check_between_steps("join: called inside forward or backward")
