"""Refuses optimizers that split or average parameters over ranks themselves."""

from __future__ import annotations

import torch

from layerzero.optim import attach

_NAMES = {
    "ZeroRedundancyOptimizer",
    "PostLocalSGDOptimizer",
    "OSS",
    "DistributedFusedAdam",
    "DistributedFusedLAMB",
}


@attach.on_sharded_params
def refuse(optimizer: torch.optim.Optimizer) -> None:
    """Check an optimizer while it is constructed.

    Raises:
        TypeError: the optimizer distributes parameters itself.
    """
    names = [cls.__name__ for cls in type(optimizer).__mro__ if cls.__name__ in _NAMES]
    if names:
        raise TypeError(
            f"{names[0]} was given parameters of a ZeRO3 module: it would overwrite other ranks' "
            "shards with this rank's. ZeRO3 splits the optimizer state over ranks already: pass "
            "the parameters to an ordinary optimizer such as torch.optim.AdamW"
        )
