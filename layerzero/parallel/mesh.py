"""Makes the device meshes of a ParallelManager: device type, and a process group for each axis."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from layerzero.comm.new_groups import agree_on_group_names, new_group, options_like
from layerzero.flat.groups import describe_group, resolve_process_groups
from layerzero.parallel.sizes import AXES, DATA_AXIS, EXPERT_AXES, MeshSizes


def make_meshes(sizes: MeshSizes, backend: str | None) -> tuple[DeviceMesh, DeviceMesh, DeviceMesh]:
    """Make the groups of every axis. Collective over the world.

    Args:
        backend: backend of every group that is made; None: that of the default group.

    Returns:
        A mesh of all ranks, with axes pp, dp, cp and tp; and two meshes of this rank's
        data-parallel ranks, with one axis, dp_cp, and with axes edp and ep.
    """
    device_type = device_type_of(backend or dist.get_backend_config())
    everyone = init_device_mesh(
        device_type,
        sizes.shape,
        mesh_dim_names=AXES,
        backend_override=_backends_of_axes(sizes, device_type, backend),
    )
    _agree_on_group_names(device_type)
    coordinate = everyone.get_coordinate()
    assert coordinate is not None, "it has all ranks"
    data_ranks = everyone.mesh[coordinate[0], :, :, coordinate[-1]].flatten()
    if sizes.cp == 1 or sizes.dp == 1:
        data_group = everyone.get_group("dp" if sizes.cp == 1 else "cp")
    else:
        data_group = _new_group(data_ranks.tolist(), device_type, backend)
    data = DeviceMesh.from_group(data_group, device_type, mesh_dim_names=(DATA_AXIS,))
    table = data_ranks.view(sizes.edp, sizes.ep)
    return everyone, data, _expert_mesh(table, data_group, device_type, backend)


def _backends_of_axes(
    sizes: MeshSizes, device_type: str, backend: str | None
) -> dict[int | str, Any] | None:
    """The backend of each axis, or its options; without any torch takes its own defaults."""
    if backend is not None:
        return dict.fromkeys(AXES, backend)
    (world,) = resolve_process_groups(None)
    options = {axis: options_like(world, torch.device(device_type)) for axis in AXES}
    # An axis of all ranks is the default group itself, unless something is said of it.
    sized = zip(AXES, sizes.shape, strict=True)
    parts = [axis for axis, size in sized if size != world.size()]
    return {axis: options[axis] for axis in parts if options[axis] is not None} or None


def _expert_mesh(
    table: torch.Tensor, data_group: dist.ProcessGroup, device_type: str, backend: str | None
) -> DeviceMesh:
    edp, ep = (table == dist.get_rank()).nonzero()[0].tolist()
    groups = [
        data_group
        if len(ranks) == table.numel()
        else _new_group(ranks.tolist(), device_type, backend)
        for ranks in (table[:, ep], table[edp])
    ]
    return DeviceMesh.from_group(groups, device_type, table, mesh_dim_names=EXPERT_AXES)


def _agree_on_group_names(device_type: str) -> None:
    """Agree on group names over the world, which the groups of some ranks made later need.

    Collective over the world.
    """
    (world,) = resolve_process_groups(None)
    is_for_cpu = "cpu" in dist.get_backend_config(world)
    device = torch.device("cpu" if is_for_cpu else device_type)
    agree_on_group_names([describe_group(world, device, None)], device)


def _new_group(ranks: list[int], device_type: str, backend: str | None) -> dist.ProcessGroup:
    """Make a group. Collective over `ranks` only, so a rank's work does not grow with the world."""
    if backend is not None:
        return new_group(ranks, backend)
    (world,) = resolve_process_groups(None)
    options = options_like(world, torch.device(device_type))
    return new_group(ranks, dist.get_backend_config(world), options=options)


def device_type_of(backend: str) -> str:
    """The device type that a backend is for.

    "cpu" if one backend serves the CPU and the accelerator, as gloo does.

    Args:
        backend: a name such as "nccl", or pairs such as "cpu:gloo,cuda:nccl".
    """
    if ":" not in backend:
        backend = str(dist.distributed_c10d.BackendConfig(dist.Backend(backend)))
    by_device = dict(pair.split(":") for pair in backend.split(","))
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type not in by_device:
        return "cpu" if "cpu" in by_device else next(iter(by_device))
    is_for_both = by_device.get("cpu") == by_device[accelerator.type]
    return "cpu" if is_for_both else accelerator.type
