"""Context parallelism: checks buffers, then uses torch's implementation, which needs CUDA."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import experimental

_DEVICE_TYPES = ("cuda",)
"""Device types with attention kernels that torch can run context-parallel."""


def context_parallel(
    mesh: DeviceMesh, buffers: Sequence[torch.Tensor], seq_dims: Sequence[int]
) -> AbstractContextManager[None]:
    """See `ParallelManager.context_parallel`."""
    _check_buffers(mesh, buffers, seq_dims)
    if mesh.size() == 1:
        return nullcontext()
    if mesh.device_type not in _DEVICE_TYPES:
        raise NotImplementedError(
            "context_parallel: torch supports attention over parts of a sequence on CUDA only, but "
            f"this mesh is on {mesh.device_type!r} (cp_size={mesh.size()}); cut sequences "
            "yourself, and "
            'gather keys and values over manager.mesh["cp"] in your own attention: '
            "docs/reference/parallelism.md"
        )
    return experimental.context_parallel(
        mesh, buffers=list(buffers), buffer_seq_dims=list(seq_dims)
    )


def _check_buffers(
    mesh: DeviceMesh, buffers: Sequence[torch.Tensor], seq_dims: Sequence[int]
) -> None:
    if not buffers or len(buffers) != len(seq_dims):
        raise ValueError(
            f"context_parallel: expected at least one buffer and a sequence dimension for each, "
            f"got {len(buffers)} buffers and seq_dims={list(seq_dims)}"
        )
    lengths = set()
    for index, (buffer, dim) in enumerate(zip(buffers, seq_dims, strict=True)):
        if not 0 <= dim < buffer.ndim:
            raise ValueError(
                f"context_parallel: buffer {index} of shape {tuple(buffer.shape)} has no dimension "
                f"{dim}; expected one from 0 to {buffer.ndim - 1}"
            )
        if buffer.requires_grad:
            raise ValueError(
                f"context_parallel: buffer {index} requires grad, but buffers are cut in place: "
                "pass inputs, labels and positions, not parameters or activations"
            )
        lengths.add(buffer.shape[dim])
    if len(lengths) > 1 or lengths.pop() % mesh.size():
        shapes = [tuple(buffer.shape) for buffer in buffers]
        raise ValueError(
            f"context_parallel: expected buffers of one sequence length, divisible by cp_size="
            f"{mesh.size()}, got shapes {shapes} with sequence dimensions "
            f"{list(seq_dims)}; pad the sequence"
        )
