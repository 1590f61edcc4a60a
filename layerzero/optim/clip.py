"""Clip the global gradient norm of sharded parameters, with one small collective per group.

Where several ranks have copies of the same elements, each contributes 1/copies of their power: no
element counts twice, one number goes through one gather for each axis, and every rank of the whole
mesh ends with the same norm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from layerzero.comm.collectives import gather_small
from layerzero.core.parameter_info import get_info
from layerzero.core.placement import Placement
from layerzero.runtime.operations import remembers_failure
from layerzero.runtime.root import RootState


@remembers_failure
def clip_grad_norm_(
    root: RootState,
    sharded: Sequence[tuple[Placement, Sequence[nn.Parameter]]],
    replicated: Sequence[nn.Parameter],
    max_norm: float,
    norm_type: float,
) -> torch.Tensor:
    """Scale gradients so that their norm over all ranks is at most `max_norm`.

    Collective over each group of owners, and each axis of the tensor-parallel mesh; does not block
    the host on a device with streams.

    Args:
        sharded: parameters with where their pieces are.
        replicated: parameters that are whole on every rank (ignored ones): copies on every owner.
        norm_type: p > 0, or infinity.

    Returns:
        The norm before clipping: a float32 scalar tensor (float64 if any parameter is), the same
        on all ranks, tensor-parallel ones included.

    Raises:
        ValueError: `norm_type` is no norm.
        NotImplementedError: an ignored parameter is a DTensor with a gradient.
    """
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ValueError(f"clip_grad_norm_: expected norm_type > 0 or inf, got {norm_type}")
    if any(isinstance(parameter.grad, DTensor) for parameter in replicated):
        raise NotImplementedError(
            "clip_grad_norm_: an ignored parameter is a DTensor with a gradient, whose part in the "
            "norm is not known; do not ignore it, or set its .grad aside and scale it yourself"
        )
    is_max = math.isinf(norm_type)
    # From all parameters, not from the gradients at hand: the same on every rank.
    dtype = torch.float32
    for parameter in (*replicated, *(p for _, parameters in sharded for p in parameters)):
        dtype = torch.promote_types(dtype, parameter.dtype)
    total = torch.zeros((), dtype=dtype, device=root.device)
    for placement, parameters in sharded:
        part = _share(root, parameters, norm_type, dtype)
        if not is_max:
            part = part / placement.num_met
        if placement is sharded[0][0] and replicated:
            own = _share(root, replicated, norm_type, dtype)
            count = math.prod(group.size for group in placement.all_owner_groups)
            part = torch.maximum(part, own) if is_max else part + own / count
        # Gathered and then reduced here: in the order of the flat buffer, which is the same however
        # ranks are grouped, and a NaN survives a maximum.
        parts = part
        for group in placement.all_owner_groups:
            operation = root.operations.next("gradient norm", "the model", group)
            parts = gather_small(parts, group, operation)
        part = parts.amax() if is_max else parts.flatten().sum()
        total = torch.maximum(total, part) if is_max else total + part
    for group in root.tensor_parallel_groups:
        operation = root.operations.next_tensor_parallel("gradient norm", "the model", group)
        parts = gather_small(total, group, operation)
        total = parts.amax() if is_max else parts.sum()
    norm = total if is_max else total.pow(1.0 / norm_type)
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for parameters in (replicated, *(parameters for _, parameters in sharded)):
        if gradients := _gradients(parameters):
            torch._foreach_mul_(gradients, scale.to(gradients[0].device))
    return norm


def _share(
    root: RootState, parameters: Sequence[nn.Parameter], norm_type: float, dtype: torch.dtype
) -> torch.Tensor:
    """What this rank contributes to the power over tensor-parallel ranks, as a scalar."""
    num_ranks = math.prod(group.size for group in root.tensor_parallel_groups)
    if num_ranks == 1:
        return _local_power(_gradients(parameters), norm_type, dtype, root.device)
    by_copies: dict[int, list[nn.Parameter]] = {}
    for parameter in parameters:
        info = get_info(parameter)
        split = None if info is None else info.tensor_parallel
        by_copies.setdefault(num_ranks if split is None else split.num_copies, []).append(parameter)
    total = torch.zeros((), dtype=dtype, device=root.device)
    for copies, members in by_copies.items():
        power = _local_power(_gradients(members), norm_type, dtype, root.device)
        total = torch.maximum(total, power) if math.isinf(norm_type) else total + power / copies
    return total


def _gradients(parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    return [
        parameter.grad
        for parameter in parameters
        if parameter.grad is not None and parameter.grad.numel()
    ]


def _local_power(
    gradients: list[torch.Tensor], norm_type: float, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Sum of |g|^p over local elements (their maximum for infinity), as a scalar."""
    if not gradients:
        return torch.zeros((), dtype=dtype, device=device)
    norms = torch.stack(torch._foreach_norm(gradients, norm_type, dtype=dtype))
    power = norms.amax() if math.isinf(norm_type) else norms.pow(norm_type).sum()
    return power.to(device)
