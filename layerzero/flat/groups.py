"""Makes a `ShardGroup` of each process group, and sets timeouts of backends."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import constants
from torch.distributed.device_mesh import DeviceMesh

from layerzero.flat.placement import ShardGroup

DEFAULT_TIMEOUT = timedelta(minutes=5)
"""Timeout of a collective by default; torch's own (10, 30 minutes) are too long."""
BACKEND_GRACE = timedelta(seconds=15)
"""Added to a backend's own timeout, so that the engine's error, which names the unit, comes before
the backend's watchdog ends the process."""
LONGEST_TIMEOUT = timedelta(days=36500)
"""Bound on timeouts: backends count nanoseconds in 64 bits, which overflow after 292 years."""


def is_timeout(timeout: timedelta) -> bool:
    """Whether a backend can wait so long."""
    return timedelta(0) < timeout <= LONGEST_TIMEOUT


def require_timeout(timeout: timedelta) -> None:
    """Raises ValueError if no backend can wait so long."""
    if not is_timeout(timeout):
        raise ValueError(
            f"timeout: expected a positive timedelta of at most 100 years, got {timeout!r}"
        )


def own_rank() -> int:
    """This process's global rank, for messages; 0 without a default group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def resolve_process_groups(
    process_group: dist.ProcessGroup | DeviceMesh | None,
) -> tuple[dist.ProcessGroup, ...]:
    """The process group of an argument; for a 2-D mesh, (inner, outer); for None, all ranks.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        ValueError: this rank is not in the group or mesh, or the mesh has more than two axes or
            ranks that do not rise along both.
        TypeError: the argument is none of the three.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "there is no process group: call torch.distributed.init_process_group first, in a "
            "script that torchrun starts"
        )
    if isinstance(process_group, DeviceMesh):
        if process_group.ndim > 2:
            raise ValueError(
                f"process_group: a mesh of {process_group.ndim} axes {tuple(process_group.shape)}; "
                "expected one axis (the shard group) or two (outer, inner)"
            )
        if process_group.get_coordinate() is None:
            raise ValueError(
                f"process_group: rank {dist.get_rank()} is not in the mesh "
                f"{process_group.mesh.tolist()}; wrap the model only on ranks of the mesh"
            )
        mesh = process_group.mesh
        if mesh.ndim == 2 and any((mesh.diff(dim=axis) <= 0).any() for axis in (0, 1)):
            # Groups are ordered by global rank: otherwise group ranks would not be coordinates.
            raise ValueError(
                f"process_group: ranks must ascend along both axes of a mesh, got {mesh.tolist()}"
            )
        return tuple(process_group.get_group(axis) for axis in reversed(range(mesh.ndim)))
    group: object = dist.group.WORLD if process_group is None else process_group
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"process_group: rank {dist.get_rank()} is not in the group; "
            "wrap the model only on ranks of the group"
        )
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            "process_group: expected a ProcessGroup, a DeviceMesh (instead of a pair of groups, "
            f"(outer, inner)) or None, got {process_group!r}"
        )
    return (group,)


def mesh_groups(
    mesh: DeviceMesh | None, device: torch.device, timeout: timedelta | None
) -> tuple[ShardGroup, ...]:
    """This rank's group along each axis of a mesh; () if it is None. Raises as `describe_group`."""
    groups = () if mesh is None else mesh.get_all_groups()
    return tuple(make_shard_group(group, device, timeout) for group in groups)


def make_shard_groups(
    process_group: dist.ProcessGroup | DeviceMesh | None,
    device: torch.device,
    timeout: timedelta | None,
) -> list[ShardGroup]:
    """The group that an argument names; of a 2-D mesh, [inner, outer]. Raises as
    `resolve_process_groups` and `make_shard_group`."""
    groups = resolve_process_groups(process_group)
    return [make_shard_group(group, device, timeout) for group in groups]


def make_shard_group(
    process_group: dist.ProcessGroup, device: torch.device, timeout: timedelta | None
) -> ShardGroup:
    """`describe_group` for a model's collectives; raises the backend's timeout if needed."""
    group = describe_group(process_group, device, timeout)
    raise_backend_timeout(group, device, group.timeout)
    return group


def describe_group(
    process_group: dist.ProcessGroup, device: torch.device, timeout: timedelta | None
) -> ShardGroup:
    """Make a `ShardGroup` for tensors on `device`; `process_group` is not changed.

    Args:
        timeout: None: `chosen_timeout`, or else `DEFAULT_TIMEOUT`.

    Raises:
        ValueError: the group has no backend for the device, or the timeout is not positive.
    """
    backends = dist.get_backend_config(process_group)
    backend = dict(part.split(":") for part in backends.split(",")).get(device.type)
    if backend is None:
        raise ValueError(
            f"process_group: none of its backends {backends!r} supports device type "
            f"{device.type!r}; move the module first or pass device="
        )
    if timeout is None:
        timeout = chosen_timeout(process_group, device) or DEFAULT_TIMEOUT
    else:
        require_timeout(timeout)
    return ShardGroup(
        process_group=process_group,
        rank=dist.get_rank(process_group),
        ranks=tuple(dist.get_process_group_ranks(process_group)),
        backend=backend,
        timeout=timeout,
    )


_given: WeakKeyDictionary[dist.ProcessGroup, dict[str, timedelta]]
_given = WeakKeyDictionary()
"""Original timeouts, by device type, of the process groups whose timeout we have raised."""


def chosen_timeout(process_group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """The timeout given to this group, or else to the default group; None: to neither.

    torch does not record whether a timeout was given: one that differs from torch's defaults counts
    as given. The default group is consulted because groups made by a mesh or `new_group` do not
    inherit its timeout.
    """
    # With a backend for each device type ("cpu:gloo,cuda:nccl") NCCL gets the general default too.
    of_torch = (None, constants.default_pg_timeout, constants.default_pg_nccl_timeout)
    for group in (process_group, dist.group.WORLD or process_group):
        given = _given.get(group, {}).get(device.type)
        timeout = _backend_timeout(group, device) if given is None else given
        if timeout not in of_torch:
            return timeout
    return None


def options_of(process_group: dist.ProcessGroup, device: torch.device) -> Any:
    """None if the backend has none, or no backend serves the device."""
    try:
        return getattr(process_group._get_backend(device), "options", None)
    except RuntimeError:
        return None


def _backend_timeout(process_group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    timeout = getattr(options_of(process_group, device), "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else None


def raise_backend_timeout(
    group: ShardGroup, device: torch.device, limit: timedelta
) -> Callable[[], None]:
    """Raise the timeout of a backend that has one, so that waits may last `limit`; never lower it.

    The group's other users share it, and none of their collectives may fail sooner than before.

    Returns:
        A function that undoes it, unless the timeout was changed once more.
    """
    process_group = group.process_group
    wanted = limit if group.backend == "gloo" else limit + BACKEND_GRACE
    before = _backend_timeout(process_group, device)
    if before is None or before >= wanted:
        return lambda: None
    set_timeout = getattr(process_group._get_backend(device), "_set_default_timeout", None)
    if set_timeout is None:
        return lambda: None
    _given.setdefault(process_group, {}).setdefault(device.type, before)
    set_timeout(wanted)

    def undo() -> None:
        if _backend_timeout(process_group, device) == wanted:
            set_timeout(before)

    return undo
