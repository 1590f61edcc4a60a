"""The process groups over which parameters are sharded, and their timeouts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import ClassVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import constants
from torch.distributed.device_mesh import DeviceMesh

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


@dataclass(frozen=True)
class ShardGroup:
    """A process group as one rank sees it: its members, this rank's number, backend, timeout."""

    process_group: dist.ProcessGroup
    rank: int
    """This rank's number in the group."""
    ranks: tuple[int, ...]
    """Global rank of each member."""
    backend: str
    """Name of the backend that serves the parameters' device."""
    timeout: timedelta
    """Bound on any collective, outside phases (`limit`)."""

    def __post_init__(self) -> None:
        self.set_limit(None)

    def set_limit(self, limit: timedelta | None) -> None:
        """Set `limit` for the waits that follow; None: back to `timeout`."""
        # Not a field: groups that differ in it alone are equal, and keep their hash.
        self.__dict__["limit"] = self.timeout if limit is None else limit

    limit: ClassVar[timedelta]
    """Bound on the waits that begin now; one that takes longer raises CollectiveError."""

    @cached_property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        return self.rank == 0


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
            "ZeRO3 needs torch.distributed: call torch.distributed.init_process_group first "
            "(or start the script with torchrun)"
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
        is_pair = isinstance(group, tuple)
        raise TypeError(
            f"process_group: expected a ProcessGroup, a DeviceMesh or None, got {process_group!r}"
            + ("; instead of a pair of groups pass a mesh (outer, inner)" if is_pair else "")
        )
    return (group,)


def mesh_groups(
    mesh: DeviceMesh | None, device: torch.device, timeout: timedelta | None
) -> tuple[ShardGroup, ...]:
    """This rank's group along each axis of a mesh; () if `mesh` is None.

    Raises:
        ValueError: a group has no backend for the device, or the timeout is not positive.
    """
    if mesh is None:
        return ()
    return tuple(
        make_shard_group(mesh.get_group(axis), device, timeout) for axis in range(mesh.ndim)
    )


def make_shard_groups(
    process_group: dist.ProcessGroup | DeviceMesh | None,
    device: torch.device,
    timeout: timedelta | None,
) -> list[ShardGroup]:
    """The group that an argument names; of a 2-D mesh, [inner, outer].

    Raises:
        RuntimeError, ValueError, TypeError: as `resolve_process_groups` and `make_shard_group`.
    """
    groups = resolve_process_groups(process_group)
    return [make_shard_group(group, device, timeout) for group in groups]


def make_shard_group(
    process_group: dist.ProcessGroup, device: torch.device, timeout: timedelta | None
) -> ShardGroup:
    """Make a `ShardGroup` for a model's collectives, and raise the backend's timeout if needed.

    Raises:
        ValueError: as `describe_group`.
    """
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


# Timeouts -------------------------------------------------------------------------------------

_given: WeakKeyDictionary[dist.ProcessGroup, dict[str, timedelta]]
_given = WeakKeyDictionary()
"""Original timeouts, by device type, of the process groups whose timeout we have raised."""


def chosen_timeout(process_group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """The timeout given to this group, or else to the default group; None: to neither.

    torch does not record whether a timeout was given: one that differs from torch's defaults counts
    as given. The default group is consulted because groups made by a mesh or `new_group` do not
    inherit its timeout.
    """
    world = dist.group.WORLD
    for group in (process_group, world if world is not None else process_group):
        timeout = _timeout_of(group, device)
        if timeout is not None and timeout not in _torch_defaults():
            return timeout
    return None


def _torch_defaults() -> tuple[timedelta | None, ...]:
    # With a backend for each device type ("cpu:gloo,cuda:nccl") NCCL gets the general default too.
    return constants.default_pg_timeout, constants.default_pg_nccl_timeout


def _timeout_of(process_group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """Timeout that the group's backend was made with; None if it has none, or does not serve the
    device."""
    given = _given.get(process_group, {}).get(device.type)
    return given if given is not None else _backend_timeout(process_group, device)


def _backend_timeout(process_group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    try:
        options = getattr(process_group._get_backend(device), "options", None)
    except RuntimeError:
        return None
    timeout = getattr(options, "_timeout", None)
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
