"""The optimizers and gradient scalers of the joins that are running (`layerzero.join`)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Literal, NoReturn, Protocol
from weakref import WeakKeyDictionary, WeakSet

import torch

ScalerCall = Literal["unscale_", "step", "update"]


class JoinOfScaler(Protocol):
    """What a join adds to the calls of its scalers."""

    def scaler_call(
        self,
        scaler: torch.amp.GradScaler,
        call: ScalerCall,
        optimizer: torch.optim.Optimizer | None,
        new_scale: float | None,
    ) -> AbstractContextManager[None]: ...


joined: WeakSet[torch.optim.Optimizer] = WeakSet()
joined_scalers: WeakKeyDictionary[torch.amp.GradScaler, JoinOfScaler] = WeakKeyDictionary()


def scaler_call(
    scaler: torch.amp.GradScaler,
    call: ScalerCall,
    optimizer: torch.optim.Optimizer | None = None,
    new_scale: float | None = None,
) -> AbstractContextManager[None]:
    """A context around a call of an enabled scaler, in which ranks of a join take part together.

    Raises:
        NotImplementedError: the optimizer is in a join that does not have the scaler.
    """
    join = joined_scalers.get(scaler)
    if join is not None:
        return join.scaler_call(scaler, call, optimizer, new_scale)
    if optimizer is not None and optimizer in joined:
        refuse_scaler(optimizer)
    return nullcontext()


def refuse_scaler(optimizer: torch.optim.Optimizer) -> NoReturn:
    """Refuse gradient scaling in a join that does not know of it.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(
        f"{type(optimizer).__name__}: a gradient scaler that the join does not have, so ranks "
        "without batches would not scale; pass a layerzero.GradScaler to layerzero.join, or train "
        "in bfloat16 (MixedPrecision)"
    )
