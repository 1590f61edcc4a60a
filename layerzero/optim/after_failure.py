"""Refuses optimizer steps after a collective failed: `.grad` may be half written."""

from __future__ import annotations

from typing import Any

import torch

from layerzero.optim import attach
from layerzero.runtime.operations import has_failures
from layerzero.runtime.sharded_params import owner_of_each


@attach.on_sharded_params
def _check_each_step(optimizer: torch.optim.Optimizer) -> None:
    optimizer.register_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """
    Raises:
        CollectiveError: a collective failed in the model of one of the parameters.
    """
    if not has_failures():
        return
    owners = owner_of_each()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            owner = owners.get(id(parameter))
            if owner is not None and owner.root.operations.has_failed:
                owner.root.operations.refuse()
