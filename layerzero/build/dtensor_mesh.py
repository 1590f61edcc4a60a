"""Finds and checks the device mesh of DTensor parameters (tensor parallelism)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from layerzero.build.wrap import UnitPlan
from layerzero.flat.tensor_parallel import is_supported


def tensor_parallel_mesh(
    plans: list[UnitPlan], everyone: Callable[[], tuple[int, ...]] | None
) -> DeviceMesh | None:
    """The mesh of the DTensor parameters; None if there are none. Not collective.

    Args:
        everyone: returns the ranks that share the model; None: these are only planned.

    Raises:
        ValueError: a DTensor has placements other than Shard and Replicate, DTensors are on
            several meshes, or the mesh and the process group share ranks besides this one.
    """
    mesh: DeviceMesh | None = None
    first = ""
    for fqn, parameter_mesh in _meshes(plans):
        if mesh is not None and parameter_mesh != mesh:
            raise ValueError(
                f"rank {dist.get_rank()}: DTensor parameters of one model need one mesh, got "
                f"{mesh} ({first!r}) and {parameter_mesh} ({fqn!r}); parallelize all modules on "
                "one mesh"
            )
        if mesh is None:
            mesh, first = parameter_mesh, fqn
    if mesh is not None:
        _check_crossing(mesh, first, everyone)
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


def _check_crossing(
    mesh: DeviceMesh, fqn: str, everyone: Callable[[], tuple[int, ...]] | None
) -> None:
    rank = dist.get_rank()
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"rank {rank} is not in the mesh {mesh.mesh.tolist()} of DTensor parameter {fqn!r}; "
            "parallelize and wrap the model only on ranks of the mesh"
        )
    if everyone is None:
        return
    shared = set(mesh.mesh.flatten().tolist()) & set(everyone())
    if shared != {rank}:
        raise ValueError(
            f"process_group: on rank {rank} it shares ranks {sorted(shared)} with the mesh "
            f"{mesh.mesh.tolist()} of DTensor parameter {fqn!r}; expected this rank only: pass the "
            'data-parallel axis, such as process_group=mesh["dp"]'
        )
