"""Finds the device and the mesh of the parameters."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from layerzero.build.wrap import UnitPlan
from layerzero.flat.groups import own_rank, resolve_process_groups
from layerzero.flat.tensor_parallel import is_supported
from layerzero.watch.events import has_streams


def resolve_device(
    device: torch.device | None,
    plans: list[UnitPlan],
    process_group: dist.ProcessGroup | DeviceMesh | None,
    mesh: DeviceMesh | None,
) -> torch.device:
    """The device for all parameters. Changes nothing.

    In this order: `device`, the device that the parameters are on, the mesh's device, the current
    accelerator if `process_group` has a backend for it, the CPU.

    Args:
        mesh: mesh of the DTensor parameters, which stay on its device type.

    Raises:
        ValueError: parameters are on several devices and `device` is None, the engine cannot run
            on the device, or the device is not of the mesh's type.
    """
    rank, found = own_rank(), _devices_of(plans)
    if device is not None:
        target = device
    elif len(found) > 1:
        places = " and ".join(f"{place} ({fqn!r})" for place, fqn in found.items())
        raise ValueError(
            f"rank {rank}: parameters need one device, got {places}; move the module first, or "
            "pass device="
        )
    elif found:
        target = next(iter(found))
    elif mesh is not None:
        target = torch.device(mesh.device_type)
    else:
        config = dist.get_backend_config(resolve_process_groups(process_group)[0])
        kinds = [part.partition(":")[0] for part in config.split(",")]
        accelerator, host = current_accelerator(), torch.device("cpu")
        target = accelerator if accelerator and accelerator.type in kinds else host
    check_device_type(target, f"rank {rank}: parameters go to {target}")
    if mesh is not None and target.type != mesh.device_type:
        raise ValueError(
            f"rank {rank}: parameters go to {target}, but the DTensors among them are "
            f"on a mesh of {mesh.device_type!r}: make the mesh for {target.type!r}, or pass "
            f"device={mesh.device_type!r}"
        )
    if target.type != "cpu" and target.index is None:
        target = torch.device(target.type, torch.get_device_module(target).current_device())
    return target


def check_device_type(device: torch.device, what: str) -> None:
    """Raise ValueError for a device without the streams and events that overlap needs.

    Args:
        what: the argument or object that requires the device, for the message.
    """
    if device.type == "cpu":
        return
    if device.type == "meta" or not has_streams(device):
        raise ValueError(
            f"{what}: expected the CPU or an accelerator with streams and events like CUDA's"
        )
    module = getattr(torch, device.type, None)
    if module is None or not module.is_available() or (device.index or 0) >= module.device_count():
        raise ValueError(f"{what}: torch finds no such device here")


def _devices_of(plans: list[UnitPlan]) -> dict[torch.device, str]:
    """The name of the first parameter on each device."""
    found: dict[torch.device, str] = {}
    for plan in plans:
        if plan.existing is not None and plan.existing.handles:
            found.setdefault(plan.existing.context.device, plan.existing.handles[0].fqns[0])
        for original in plan.originals:
            if not original.parameter.is_meta:
                found.setdefault(original.parameter.device, original.fqn)
    return found


def current_accelerator() -> torch.device | None:
    """This process's accelerator, of any kind that has streams; None without one."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None or not has_streams(kind):
        return None
    return torch.device(kind.type, torch.accelerator.current_device_index())


def tensor_parallel_mesh(
    plans: list[UnitPlan], everyone: tuple[int, ...] | None
) -> DeviceMesh | None:
    """The mesh of the DTensor parameters; None if there are none. Not collective.

    Args:
        everyone: the ranks that share the model; None: these are only planned.

    Raises:
        ValueError: a DTensor has placements other than Shard and Replicate, DTensors are on
            several meshes, or the mesh and the process group share ranks besides this one.
    """
    named = [*_meshes(plans)]
    if not named:
        return None
    rank = dist.get_rank()
    first, mesh = named[0]
    for fqn, other in named:
        if other != mesh:
            raise ValueError(
                f"rank {rank}: DTensor parameters of one model need one mesh, got "
                f"{mesh} ({first!r}) and {other} ({fqn!r}); parallelize all modules on one mesh"
            )
    shared = set(mesh.mesh.flatten().tolist()) & set(everyone or ())
    if everyone is not None and shared != {rank}:
        raise ValueError(
            f"process_group: on rank {rank} it shares ranks {sorted(shared)} with the mesh "
            f"{mesh.mesh.tolist()} of DTensor parameter {first!r}; expected this rank only: wrap "
            'on ranks of the mesh alone, with its data-parallel axis: process_group=mesh["dp"]'
        )
    return mesh


def _meshes(plans: list[UnitPlan]) -> Iterator[tuple[str, DeviceMesh]]:
    for plan in plans:
        for handle in plan.existing.handles if plan.existing is not None else ():
            for fqn, split in zip(handle.fqns, handle.splits, strict=True):
                if split is not None:
                    yield fqn, split.mesh
        for original in plan.originals:
            parameter = original.parameter
            if not isinstance(parameter, DTensor):
                continue
            if not is_supported(parameter):
                raise ValueError(
                    f"{plan.label} (rank {dist.get_rank()}): parameter {original.fqn!r} is a "
                    f"DTensor with placements {parameter.placements}; expected Shard(dim) or "
                    "Replicate() along each axis of its mesh: redistribute() it before wrapping"
                )
            yield original.fqn, parameter.device_mesh
