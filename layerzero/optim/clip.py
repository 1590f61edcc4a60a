"""Computes and clips the global gradient norm of sharded parameters."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn
from torch.amp.grad_scaler import OptState
from torch.distributed.tensor import DTensor

from layerzero.flat.placement import Placement, sum_dtype
from layerzero.optim import norm as norms
from layerzero.optim.norm import Part
from layerzero.step.root import RootState
from layerzero.step.unit import Unit

if TYPE_CHECKING:
    from layerzero.optim.flat_state import FlatState

_NOBODY = nn.Parameter(torch.empty(0, device="cpu"), requires_grad=False)


class Clipped(NamedTuple):
    """The parameters whose gradients are clipped by one norm."""

    root: RootState
    units: Sequence[Unit]
    """Units with sharded parameters."""
    replicated: Sequence[nn.Parameter]
    """Ignored parameters, of which every rank has a full copy."""
    chosen: Container[nn.Parameter] | None = None
    """The sharded parameters that are meant; None: all of the units'."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        own = (each for unit in self.units for each in unit.sharded_params)
        return [*self.replicated, *filter(self.is_meant, own)]

    def is_meant(self, sharded_param: nn.Parameter) -> bool:
        return self.chosen is None or sharded_param in self.chosen


def refuse_used(root: RootState) -> None:
    """Refuse to clip gradients that an optimizer has already used.

    Raises:
        RuntimeError: `step_in_backward` is on.
    """
    if root.reducer.step_by is not None:
        raise RuntimeError(
            "clip_grad_norm_ after step_in_backward: the optimizer has used the gradients already; "
            "call step_in_backward(None), clip after backward, then call optimizer.step()"
        )


def grad_norm(of: Clipped, norm_type: float) -> torch.Tensor:
    """The norm of gradients over all ranks.

    Collective over the groups that own shards, and over each axis of the tensor-parallel mesh. Does
    not block the host on a device with streams.

    Args:
        norm_type: p > 0, or infinity.

    Returns:
        A float32 scalar tensor (float64 if any parameter is), the same on all ranks, including
        tensor-parallel ones.

    Raises:
        ValueError: `norm_type` is neither > 0 nor infinity.
        NotImplementedError: an ignored parameter is a DTensor with a gradient.
    """
    norm_type = norms.checked_norm_type(norm_type, "clip_grad_norm_")
    if any(isinstance(parameter.grad, DTensor) for parameter in of.replicated):
        raise NotImplementedError(
            "clip_grad_norm_: an ignored parameter is a DTensor with a gradient, whose share of "
            "the norm is unknown; do not ignore it, or remove its .grad and scale it yourself"
        )
    # From all parameters, not only those with a gradient here: the same on every rank.
    dtype = sum_dtype(*{parameter.dtype for parameter in of.parameters})
    whole = [Part(p, p.grad) for p in of.replicated if p.grad is not None and p.grad.numel()]
    given = norms.sharded_parts(of.units, lambda each: each.grad if of.is_meant(each) else None)
    power = norms.global_power(of.root, given, whole, norm_type, dtype, "gradient norm")
    return norms.root_of_power(power, norm_type)


def flat_norm(root: RootState, flats: Sequence[FlatState]) -> torch.Tensor:
    """`grad_norm` of order 2 of the gradients of flat states, added in float64, in a model without
    tensor-parallel groups."""
    whole: list[torch.Tensor] = []
    # All placements of the model, also without a gradient: every rank runs the same gathers.
    sharded: dict[int, tuple[Placement, list[torch.Tensor]]]
    sharded = {id(each): (each, []) for each in root.placements}
    for flat in flats:
        handle = flat.handle
        found = whole if handle is None else sharded[id(handle.placement)][1]
        found += flat.gradients()
    given = [(placement, _as_part(gradients)) for placement, gradients in sharded.values()]
    power = norms.global_power(root, given, _as_part(whole), 2.0, torch.float64, "gradient norm")
    is_wide = any(flat.main.dtype == torch.float64 for flat in flats)
    return power.sqrt() if is_wide else power.sqrt().float()


def _as_part(gradients: list[torch.Tensor]) -> list[Part]:
    """One tensor whose norm is that of all of these; its parameter does not matter."""
    return [Part(_NOBODY, norms.norms_of(gradients))] if gradients else []


def scale_of_gradients(
    scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer
) -> torch.Tensor | None:
    """What an optimizer's gradients are multiplied by, a scalar tensor; None: by nothing.

    Raises:
        RuntimeError: the scaler is enabled and has scaled no loss.
    """
    if not scaler.is_enabled():
        return None
    if scaler._scale is None:
        raise RuntimeError(
            "clip_grad_norm_: the scaler has scaled no loss; call scaler.scale(loss).backward() "
            "first"
        )
    stage = scaler._per_optimizer_states[id(optimizer)]["stage"]
    return scaler._scale if stage is OptState.READY else None


def clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """The factor that scales gradients of this norm down to `max_norm`; 1 if it is not above."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def scale_gradients_(parameters: Iterable[nn.Parameter], factor: torch.Tensor) -> None:
    """Multiply gradients by a scalar, in place, each on its own device. Not collective."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None and gradient.numel():
            by_device.setdefault(gradient.device, []).append(gradient)
    for device, gradients in by_device.items():
        torch._foreach_mul_(gradients, factor.to(device))


def clip_grad_norm_(of: Clipped, max_norm: float, norm_type: float) -> torch.Tensor:
    """Scale gradients in place so that their norm is at most `max_norm`. Collective as `grad_norm`.

    Returns:
        The norm before scaling; see `grad_norm`.
    """
    norm = grad_norm(of, norm_type)
    scale_gradients_(of.parameters, clip_factor(norm, max_norm))
    return norm
