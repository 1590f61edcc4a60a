"""Conversion between DTensor parameters and the local tensors that the engine shards.

    DTensor parameter --local_of--> flat buffer --wrap--> unsharded parameter, a DTensor again
    its gradient, a DTensor in any placements --localize--> gradient buffer

Only `localize` is collective: over the mesh, if placements differ.
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
from torch.utils._python_dispatch import _disable_current_modes


@dataclass(frozen=True)
class TensorParallelSplit:
    """How a DTensor parameter is split over tensor-parallel ranks, and which part this rank has."""

    mesh: DeviceMesh
    """Mesh of the tensor-parallel ranks; none of its axes is `ZeRO3`'s process group."""
    placements: tuple[Placement, ...]
    """`Shard(dim)` or `Replicate()` for each axis of the mesh."""
    shape: torch.Size
    """Shape of the whole parameter."""
    local_shape: torch.Size
    """Shape of this rank's part; parts may differ in size, and may be empty."""
    offset: tuple[int, ...]
    """Position of the part's first element in the whole, one number per dimension."""

    @property
    def num_copies(self) -> int:
        """Number of ranks of the mesh that hold the same part."""
        return math.prod(
            self.mesh.size(axis)
            for axis, placement in enumerate(self.placements)
            if placement.is_replicate()
        )

    def wrap(self, local: torch.Tensor) -> DTensor:
        """Make a DTensor on the memory of `local` ([local_shape], contiguous), without autograd."""
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
        """Return the local part of a gradient or value, in this split's placements.

        Collective over the mesh axes on which the placements of `tensor` differ from these;
        partial values are summed, in their dtype.

        Args:
            tensor: [shape]; if it is not a DTensor, the whole value, the same on all ranks.
            name: name of the parameter, for the error.

        Raises:
            RuntimeError: torch failed to redistribute it.
        """
        if not isinstance(tensor, DTensor):
            everywhere = [Replicate()] * self.mesh.ndim
            tensor = DTensor.from_local(tensor, self.mesh, everywhere, run_check=False)
        if tensor.placements == self.placements:
            return _to_local(tensor)
        try:
            return _to_local(tensor.redistribute(self.mesh, self.placements))
        except RuntimeError as error:
            raise RuntimeError(
                f"parameter {name!r}: redistributing its value or gradient from placements "
                f"{tensor.placements} to {self.placements} over the tensor-parallel ranks "
                f"{self.mesh.mesh.tolist()} failed: {error}"
            ) from error


def split_of(tensor: torch.Tensor) -> TensorParallelSplit | None:
    """How a DTensor is split; None for any other tensor."""
    if not isinstance(tensor, DTensor):
        return None
    placements, mesh = tensor.placements, tensor.device_mesh
    with _disable_current_modes():  # It reads tensors of its own, which may be made without values.
        local_shape, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    return TensorParallelSplit(
        mesh, placements, tensor.shape, torch.Size(local_shape), tuple(offset)
    )


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, detached; of a DTensor, the local tensor, once collectives on it are done."""
    tensor = tensor.detach()
    return _to_local(tensor) if isinstance(tensor, DTensor) else tensor


def _to_local(tensor: DTensor) -> torch.Tensor:
    with torch.no_grad():  # Else `to_local` would add a node to the autograd graph.
        local = tensor.to_local()
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def is_supported(tensor: DTensor) -> bool:
    """Whether a `TensorParallelSplit` can describe its placements."""
    # Not `isinstance`: in some versions of torch `_StridedShard` is derived from `Shard`.
    return all(p.is_replicate() or type(p) is Shard for p in tensor.placements)
