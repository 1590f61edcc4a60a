"""The scale that gradients have now, of a gradient scaler."""

from __future__ import annotations

import torch
from torch.amp.grad_scaler import OptState


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
            "clip_grad_norm_: the scaler has scaled no loss; call "
            "scaler.scale(loss).backward() before"
        )
    stage = scaler._per_optimizer_states[id(optimizer)]["stage"]
    return scaler._scale if stage is OptState.READY else None
