"""What the engine knows of DTensors: the local tensor goes in, a DTensor view of it comes out.

    DTensor parameter --local_of--> flat buffer --wrap--> leaf, a DTensor again
    its gradient, a DTensor in any placements --localize--> gradient buffer

`localize` is collective over the mesh where the placements differ; nothing else here is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement


@dataclass(frozen=True)
class TensorParallelSplit:
    """How a DTensor parameter is split over tensor-parallel ranks, and which part is here."""

    mesh: DeviceMesh
    """The tensor-parallel ranks; its axes are not those of the process group of `ZeRO3`."""
    placements: tuple[Placement, ...]
    """For each axis of the mesh `Shard(dim)` or `Replicate()`."""
    shape: torch.Size
    """Of the whole parameter."""
    local_shape: torch.Size
    """Of the part that this rank's tensor-parallel coordinate has; uneven parts may be empty."""
    offset: tuple[int, ...]
    """Of its first element in the whole, one number per dimension."""

    @property
    def num_copies(self) -> int:
        """Ranks of the mesh that have the same part."""
        return math.prod(
            self.mesh.size(axis)
            for axis, placement in enumerate(self.placements)
            if placement.is_replicate()
        )

    def wrap(self, local: torch.Tensor) -> DTensor:
        """A DTensor on the memory of `local` [local_shape, contiguous], without autograd."""
        whole = torch.empty(self.shape, device="meta")
        return DTensor.from_local(
            local,
            self.mesh,
            self.placements,
            run_check=False,
            shape=self.shape,
            stride=whole.stride(),
        )

    def localize(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """The local part of a gradient or value, in this split's placements.

        Collective over the axes of the mesh along which `tensor` is placed otherwise: where it is
        partial it is summed, in its dtype.

        Args:
            tensor: of the whole shape; one that is no DTensor is the whole, the same on all ranks.
            name: of the parameter, for the error.

        Raises:
            RuntimeError: torch could not bring it there.
        """
        if not isinstance(tensor, DTensor):
            everywhere = [Replicate()] * self.mesh.ndim
            tensor = DTensor.from_local(tensor, self.mesh, everywhere, run_check=False)
        if tensor.placements != self.placements:
            tensor = self._redistribute(tensor, name)
        return _to_local(tensor)

    def _redistribute(self, tensor: DTensor, name: str) -> DTensor:
        try:
            return tensor.redistribute(self.mesh, self.placements)
        except RuntimeError as error:
            raise RuntimeError(
                f"parameter {name!r}: its value or gradient came in placements "
                f"{tensor.placements}, and bringing it to {self.placements} over the "
                f"tensor-parallel ranks {self.mesh.mesh.tolist()} failed: {error}"
            ) from error


def split_of(tensor: torch.Tensor) -> TensorParallelSplit | None:
    """How a DTensor is split; None for any other tensor."""
    if not isinstance(tensor, DTensor):
        return None
    placements, mesh = tensor.placements, tensor.device_mesh
    local_shape, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    return TensorParallelSplit(
        mesh, placements, tensor.shape, torch.Size(local_shape), tuple(offset)
    )


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor, detached: of a DTensor the local one, once it is there."""
    tensor = tensor.detach()
    return _to_local(tensor) if isinstance(tensor, DTensor) else tensor


def _to_local(tensor: DTensor) -> torch.Tensor:
    with torch.no_grad():  # With autograd on it would be a node of a graph.
        local = tensor.to_local()
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def is_supported(tensor: DTensor) -> bool:
    """Whether its placements are those of a `TensorParallelSplit`."""
    # Strided shards are shards to `isinstance` in some versions of torch.
    return all(p.is_replicate() or type(p) is Shard for p in tensor.placements)
