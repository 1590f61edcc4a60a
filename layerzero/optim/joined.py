"""The optimizers of the joins that are running (`layerzero.join`)."""

from __future__ import annotations

from typing import NoReturn
from weakref import WeakSet

import torch

joined: WeakSet[torch.optim.Optimizer] = WeakSet()


def refuse_scaler(optimizer: torch.optim.Optimizer) -> NoReturn:
    """Refuse gradient scaling in a join.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(
        f"{type(optimizer).__name__}: gradient scalers do not work inside a join, because ranks "
        "without batches do not scale; train in bfloat16 (MixedPrecision), or disable the scaler"
    )
