"""Copies of modules and batches that have shapes and dtypes, but no memory."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from layerzero.flat.parameter_info import copy_attributes
from layerzero.flat.tensor_parallel import local_of, split_of


def hollow_copy(module: nn.Module) -> tuple[nn.Module, dict[int, Any]]:
    """A copy of `module` with its parameters and buffers on the meta device.

    Returns:
        (the copy, what became of each object, keyed by its id).

    Raises:
        ValueError: the module cannot be copied.
    """
    memo: dict[int, Any] = {}
    for inner in module.modules():
        for tensors in (inner._parameters, inner._buffers):
            for tensor in tensors.values():
                if tensor is not None and id(tensor) not in memo:
                    memo[id(tensor)] = _hollow(tensor)
    try:
        copied = copy.deepcopy(module, memo)
    except Exception as error:
        raise ValueError(
            f"plan_memory: this {type(module).__name__} cannot be copied, and the plan runs a copy "
            f"of it: {type(error).__name__}: {error}"
        ) from error
    return copied, memo


def _hollow(tensor: torch.Tensor) -> torch.Tensor:
    local = local_of(tensor)
    made = torch.empty_strided(local.size(), local.stride(), dtype=local.dtype, device="meta")
    split = split_of(tensor)
    if split is not None:
        made = split.wrap(made)
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(made, requires_grad=tensor.requires_grad)
    copy_attributes(tensor, made)
    return made


def allocated(batch: Any) -> Any:
    """`batch` with each tensor replaced by a new one of its shape and dtype, on the CPU."""

    def fresh(tensor: torch.Tensor) -> torch.Tensor:
        made = torch.empty(tensor.shape, dtype=tensor.dtype)
        return made.requires_grad_(tensor.requires_grad)

    return tree_map_only(torch.Tensor, fresh, batch)
