"""JoinedScalers: how the gradient scalers of a rank without batches follow those of the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from layerzero.optim.scaler import GradScaler, ScalerCall
from layerzero.uneven.optimizers import JoinedOptimizers
from layerzero.uneven.requests import Kind, Request, bits_of, number_of

_KINDS: dict[ScalerCall, Kind] = {
    "unscale_": Kind.UNSCALE,
    "step": Kind.SCALED_STEP,
    "update": Kind.UPDATE,
}


class JoinedScalers:
    """The scalers of one join, in an order that is the same on every rank."""

    def __init__(self, scalers: Sequence[GradScaler], optimizers: JoinedOptimizers) -> None:
        self.all = tuple(scalers)
        self._optimizers = optimizers

    def request(
        self,
        scaler: torch.amp.GradScaler,
        call: ScalerCall,
        optimizer: int,
        new_scale: float | None,
    ) -> Request:
        """A call that this rank wants to make next; `optimizer` is its index in the join's list."""
        index = next(i for i, each in enumerate(self.all) if each is scaler)
        which = index * max(len(self._optimizers), 1) + optimizer
        bits = 0 if new_scale is None else bits_of(new_scale)
        return Request(_KINDS[call], which, first=new_scale is not None, second=bits)

    def follow(self, request: Request, device: torch.device) -> None:
        """Make the call that another rank makes."""
        index, optimizer = divmod(request.which, max(len(self._optimizers), 1))
        scaler = self.all[index]
        scaler.scale(torch.zeros((), device=device))  # Sets it up, if this rank never scaled.
        if request.kind == Kind.UNSCALE:
            scaler.unscale_(self._optimizers.all[optimizer])
        elif request.kind == Kind.SCALED_STEP:
            scaler.step(self._optimizers.all[optimizer])
        else:
            scaler.update(number_of(request.second) if request.first else None)
