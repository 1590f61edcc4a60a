"""The process groups parameters are sharded over, and this rank's place in them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import constants
from torch.distributed.device_mesh import DeviceMesh

DEFAULT_TIMEOUT = timedelta(minutes=5)
"""Of a collective, where nobody chose one: torch's defaults are for barriers, and far too long."""
BACKEND_GRACE = timedelta(seconds=15)
"""How much longer a backend's own watchdog waits, which knows no units and ends the process."""


@dataclass(frozen=True)
class ShardGroup:
    """The ranks one unit's parameters are gathered over (the ZeRO-3 group)."""

    process_group: dist.ProcessGroup
    rank: int
    """This rank's place in the group."""
    ranks: tuple[int, ...]
    """Global rank of each member."""
    backend: str
    """Backend that serves the device parameters live on."""
    timeout: timedelta
    """How long any collective may take before it is an error."""

    @cached_property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def resolve_process_groups(
    process_group: dist.ProcessGroup | DeviceMesh | None,
) -> tuple[dist.ProcessGroup, ...]:
    """The process group an argument names, or of a 2-D mesh the inner and the outer one.

    Raises:
        ValueError, TypeError: what was expected instead.
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
            # A group is in the order of global ranks, so its ranks would not be the coordinates.
            raise ValueError(
                f"process_group: ranks must rise along both axes of a mesh, got {mesh.tolist()}"
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
            + ("; for a pair of groups a mesh (outer, inner)" if is_pair else "")
        )
    return (group,)


def mesh_groups(
    mesh: DeviceMesh | None, device: torch.device, timeout: timedelta | None
) -> tuple[ShardGroup, ...]:
    """This rank's group along each axis of a mesh; none without one.

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
    """The group that an argument names, or of a 2-D mesh the inner and the outer one.

    Raises:
        ValueError, TypeError: as `resolve_process_groups` and `make_shard_group`.
    """
    groups = resolve_process_groups(process_group)
    return [make_shard_group(group, device, timeout) for group in groups]


def make_shard_group(
    process_group: dist.ProcessGroup, device: torch.device, timeout: timedelta | None
) -> ShardGroup:
    """Take `process_group` for the collectives of a model, and bound its waits.

    Raises:
        ValueError: as `describe_group`.
    """
    group = describe_group(process_group, device, timeout)
    grace = timedelta(0) if group.backend == "gloo" else BACKEND_GRACE
    _let_backend_wait(process_group, device, group.timeout + grace)
    return group


def describe_group(
    process_group: dist.ProcessGroup, device: torch.device, timeout: timedelta | None
) -> ShardGroup:
    """What `process_group` is for tensors on `device`; it stays as it is.

    Args:
        timeout: None: see `chosen_timeout`.

    Raises:
        ValueError: the group has no backend for the device, or the timeout is not positive.
    """
    backends = dist.get_backend_config(process_group)
    backend = dict(part.split(":") for part in backends.split(",")).get(device.type)
    if backend is None:
        raise ValueError(
            f"process_group: its backends are {backends!r}, none serves device type "
            f"{device.type!r}; move the module first or pass device="
        )
    if timeout is None:
        timeout = chosen_timeout(process_group, device) or DEFAULT_TIMEOUT
    elif timeout <= timedelta(0):
        raise ValueError(f"timeout: expected a positive timedelta, got {timeout!r}")
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
"""The timeouts that process groups were made with, by device type, where they were raised since."""


def chosen_timeout(process_group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """The timeout that somebody gave the group, or else the default group; None: nobody did.

    torch does not keep whether a timeout was given, so one that differs from torch's own defaults
    was. Groups that a mesh or `new_group` makes have the default whatever the default group has.
    """
    world = dist.group.WORLD
    for group in (process_group, world if world is not None else process_group):
        timeout = _timeout_of(group, device)
        if timeout is not None and timeout not in _torch_defaults():
            return timeout
    return None


def _torch_defaults() -> tuple[timedelta | None, ...]:
    # A backend for each kind of device ("cpu:gloo,cuda:nccl") has the general default on all.
    return constants.default_pg_timeout, constants.default_pg_nccl_timeout


def _timeout_of(process_group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """What the group's backend was made with; None where it does not tell, or serves another."""
    given = _given.get(process_group, {}).get(device.type)
    return given if given is not None else _backend_timeout(process_group, device)


def _backend_timeout(process_group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    try:
        options = getattr(process_group._get_backend(device), "options", None)
    except RuntimeError:
        return None
    timeout = getattr(options, "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else None


def _let_backend_wait(
    process_group: dist.ProcessGroup, device: torch.device, timeout: timedelta
) -> None:
    """Have a backend that bounds waits itself wait as long; what waits longer stays as it is.

    Collectives of others use the group, too, and none may fail sooner than before.
    """
    current = _backend_timeout(process_group, device)
    if current is None or current >= timeout:
        return
    set_timeout = getattr(process_group._get_backend(device), "_set_default_timeout", None)
    if set_timeout is not None:
        _given.setdefault(process_group, {}).setdefault(device.type, current)
        set_timeout(timeout)
