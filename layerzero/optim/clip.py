"""Clip the global gradient norm of sharded parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from layerzero.core.placement import Placement
from layerzero.optim.norm import Part, checked_norm_type, global_power, root_of_power
from layerzero.runtime.root import RootState


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
    norm_type = checked_norm_type(norm_type, "clip_grad_norm_")
    if any(isinstance(parameter.grad, DTensor) for parameter in replicated):
        raise NotImplementedError(
            "clip_grad_norm_: an ignored parameter is a DTensor with a gradient, whose part in the "
            "norm is not known; do not ignore it, or set its .grad aside and scale it yourself"
        )
    # From all parameters, not from the gradients at hand: the same on every rank.
    dtype = torch.float32
    for parameter in (*replicated, *(p for _, parameters in sharded for p in parameters)):
        dtype = torch.promote_types(dtype, parameter.dtype)
    power = global_power(
        root,
        [(placement, _with_gradients(parameters)) for placement, parameters in sharded],
        _with_gradients(replicated),
        norm_type,
        dtype,
        "gradient norm",
    )
    norm = root_of_power(power, norm_type)
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for parameters in (replicated, *(parameters for _, parameters in sharded)):
        if gradients := [part.tensor for part in _with_gradients(parameters)]:
            torch._foreach_mul_(gradients, scale.to(gradients[0].device))
    return norm


def _with_gradients(parameters: Sequence[nn.Parameter]) -> list[Part]:
    return [
        Part(parameter, parameter.grad)
        for parameter in parameters
        if parameter.grad is not None and parameter.grad.numel()
    ]
