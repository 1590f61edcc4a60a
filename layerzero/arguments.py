"""Checks of what `ZeRO3` is given, before anything is changed; and a warning after."""

from __future__ import annotations

import gc
import warnings
from datetime import timedelta
from typing import get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from layerzero.comm.collectives import Operation, gather_small
from layerzero.config import Accumulation, OffloadPolicy, ReshardAfterForward
from layerzero.core.groups import make_shard_group, resolve_process_groups
from layerzero.core.host import is_apart_from
from layerzero.core.placement import Outer
from layerzero.runtime.unit import Unit, get_unit

_OUTER: tuple[Outer, ...] = get_args(Outer)


def check_module(module: nn.Module) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"ZeRO3: expected an nn.Module, got {type(module).__name__}")
    if get_unit(module) is not None:
        raise RuntimeError(
            f"ZeRO3: this {type(module).__name__} is wrapped already; wrap each module once, or "
            "wrap a module that contains it"
        )


def check_group(
    process_group: dist.ProcessGroup | DeviceMesh | None, zero3_size: int | None, outer: str
) -> dist.ProcessGroup:
    """A group with the backends of all, to find the device with. Not collective.

    Raises:
        ValueError, TypeError: a group, a size or a mode that does not exist.
    """
    if outer not in ("zero1", "replicate", "shard"):
        raise ValueError(f"outer: expected 'zero1', 'replicate' or 'shard', got {outer!r}")
    if zero3_size is not None and not isinstance(zero3_size, int):
        raise TypeError(f"zero3_size: expected an int or None, got {zero3_size!r}")
    return resolve_process_groups(process_group)[0]


def check_agreement(
    process_group: dist.ProcessGroup | DeviceMesh | None,
    device: torch.device,
    zero3_size: int | None,
    outer: Outer,
    timeout: timedelta | None,
) -> None:
    """Refuse what differs between ranks, or does not fit. Collective over the group, or the mesh.

    Raises:
        ValueError: the same on every rank, with every rank's values where they differ.
        CollectiveError: a rank did not come.
    """
    groups = resolve_process_groups(process_group)
    axes = [make_shard_group(group, device, timeout) for group in groups]
    num_inner, num_outer = axes[0].size, axes[1].size if len(axes) == 2 else 1
    own = [num_inner if zero3_size is None else zero3_size, _OUTER.index(outer)]
    values = torch.tensor(own, device=device)
    for axis in axes:
        if axis.size > 1:
            values = gather_small(values, axis, Operation("agreement", "zero3_size and outer", 0))
    every = values.view(-1, 2).tolist()
    if any(other != every[0] for other in every):
        listed = "; ".join(f"zero3_size={size}, outer={_OUTER[mode]!r}" for size, mode in every)
        raise ValueError(
            f"zero3_size and outer differ between ranks, in the group's order: {listed}"
        )
    if zero3_size is not None and len(axes) == 2 and zero3_size != num_inner:
        raise ValueError(
            f"zero3_size={zero3_size} and a mesh (outer, inner) of {num_outer, num_inner}: the "
            f"shard groups of the mesh have {num_inner} ranks; leave out zero3_size"
        )
    if zero3_size is not None and (zero3_size < 1 or num_inner % zero3_size):
        raise ValueError(
            f"zero3_size: expected a divisor of the group size {num_inner}, got {zero3_size}"
        )
    has_outer = num_outer > 1 or zero3_size not in (None, num_inner)
    if outer != "zero1" and not has_outer:
        warnings.warn(
            f"outer={outer!r} has no effect: the shard group is the whole group, there is no axis "
            "outside it",
            stacklevel=3,
        )


def check_accumulation(accumulation: str) -> None:
    if accumulation not in get_args(Accumulation):
        raise ValueError(
            f"accumulation: expected 'sharded', 'unsharded' or 'auto', got {accumulation!r}"
        )


def effective_offload(offload: OffloadPolicy | None, device: torch.device) -> OffloadPolicy:
    """What can be offloaded from `device`; a warning where nothing can."""
    if offload is None:
        return OffloadPolicy()
    if not isinstance(offload, OffloadPolicy):
        raise TypeError(f"offload: expected an OffloadPolicy or None, got {offload!r}")
    if (offload.params or offload.grads) and not is_apart_from(device):
        warnings.warn(
            f"offload={offload} has no effect: {device} has no memory of its own", stacklevel=3
        )
        return OffloadPolicy()
    return offload


def check_reshard_after_forward(value: object) -> ReshardAfterForward:
    if value == "compute_shard":
        return "compute_shard"
    if isinstance(value, bool):
        return value
    raise ValueError(
        f"reshard_after_forward: expected True, False or 'compute_shard', got {value!r}"
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
