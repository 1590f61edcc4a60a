"""The coordinates of a patch as vLLM's sparse weight transfer takes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from layerzero.checkpoint.delta.patch import DeltaError, Patch


class VllmPatch(NamedTuple):
    """The three fields of vLLM's `SparseWeightPatch(name, indices, values)`."""

    name: str
    indices: torch.Tensor
    """[n] int32, flat in the tensor."""
    values: torch.Tensor
    """[n]."""


def vllm_patch(patch: Patch, rename: Callable[[str], str] | None = None) -> VllmPatch:
    """A patch in vLLM's form: `SparseWeightPatch(*vllm_patch(patch))`.

    vLLM keeps no chain: whoever passes patches on to it sees to it that none is lost.

    Args:
        rename: returns the name in vLLM for that in the model's state dict; None: they are equal.
            For a parameter that vLLM stores merged with others, indices need an offset as well.

    Raises:
        DeltaError: an index does not fit into 32 bits.
    """
    numel = torch.Size(patch.shape).numel()
    if numel > 2**31:
        raise DeltaError(
            f"{patch.where}: vLLM takes 32-bit indices, and the tensor has {numel} elements"
        )
    name = patch.name if rename is None else rename(patch.name)
    return VllmPatch(name, patch.indices.to(torch.int32), patch.values)
