"""Checks of what `ZeRO3` is given, before anything is changed; and a warning after."""

from __future__ import annotations

import gc
import warnings

import torch
import torch.distributed as dist
from torch import nn

from layerzero.config import OffloadPolicy
from layerzero.runtime.unit import Unit, get_unit


def check_module(module: nn.Module) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"ZeRO3: expected an nn.Module, got {type(module).__name__}")
    if get_unit(module) is not None:
        raise RuntimeError(
            f"ZeRO3: this {type(module).__name__} is wrapped already; wrap each module once, or "
            "wrap a module that contains it"
        )


def check_not_yet_supported(
    process_group: dist.ProcessGroup,
    zero3_size: int | None,
    outer: str,
    offload: OffloadPolicy | None,
    accumulation: str,
) -> None:
    size = dist.get_world_size(process_group)
    if outer not in ("zero1", "replicate", "shard"):
        raise ValueError(f"outer: expected 'zero1', 'replicate' or 'shard', got {outer!r}")
    if accumulation not in ("sharded", "unsharded", "auto"):
        raise ValueError(
            f"accumulation: expected 'sharded', 'unsharded' or 'auto', got {accumulation!r}"
        )
    if zero3_size is not None and (zero3_size < 1 or size % zero3_size):
        raise ValueError(
            f"zero3_size: expected a divisor of the group size {size}, got {zero3_size}"
        )
    if zero3_size not in (None, size):
        raise NotImplementedError(
            f"zero3_size={zero3_size} in a group of {size}: shard groups smaller than the group "
            "are not supported yet; pass a smaller process_group or None"
        )
    if offload is not None and (offload.params or offload.grads):
        raise NotImplementedError(f"offload={offload}: offloading is not supported yet")
    if outer != "zero1":
        warnings.warn(
            f"outer={outer!r} has no effect: the shard group is the whole group, there is no axis "
            "outside it",
            stacklevel=3,
        )
    if accumulation == "sharded":
        raise NotImplementedError(
            "accumulation='sharded' inside no_sync is not supported yet; leave out no_sync: "
            "gradients are then reduced and added up sharded in every backward"
        )


def warn_about_old_optimizers(built: list[Unit]) -> None:
    """An optimizer made before wrapping still holds, and would update, the old parameters."""
    alive = {
        id(parameter): fqn
        for unit in built
        for fqn, reference in unit.originals
        if (parameter := reference()) is not None
    }
    if not alive:
        return
    for candidate in gc.get_objects():
        # Not isinstance: it asks the object itself for its class, and lazy ones then load or warn.
        if not issubclass(type(candidate), torch.optim.Optimizer):
            continue
        held = [
            alive[id(parameter)]
            for group in candidate.param_groups
            for parameter in group["params"]
            if id(parameter) in alive
        ]
        if held:
            warnings.warn(
                f"an optimizer ({type(candidate).__name__}) was built before wrapping and holds "
                f"{len(held)} parameters that no longer belong to the model, {held[0]!r} first; "
                "build it from the wrapped model's parameters()",
                stacklevel=3,
            )
