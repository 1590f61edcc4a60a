"""Patches functions of Lightning that are wrong for sharded parameters: identity and counts.

The replacements handle sharded parameters, and call the original functions for all others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.utilities.model_summary.model_summary import LayerSummary, ModelSummary
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from layerzero.integrations.engine import get_info
from layerzero.integrations.shared import count, is_sharded

_PATCHED = "_layerzero_patched"


def patch_lightning() -> None:
    """Patch Lightning's functions; a second call changes nothing."""
    if hasattr(BaseFinetuning.filter_on_optimizer, _PATCHED):
        return
    BaseFinetuning.filter_on_optimizer = staticmethod(
        _by_identity(BaseFinetuning.filter_on_optimizer)
    )
    for owner, name, model_of, only_trainable in (
        (LayerSummary, "num_parameters", "_module", False),
        (ModelSummary, "total_parameters", "_model", False),
        (ModelSummary, "trainable_parameters", "_model", True),
    ):
        setattr(owner, name, _in_full(vars(owner)[name], model_of, only_trainable))


def _by_identity(
    former: Callable[[torch.optim.Optimizer, Iterable[nn.Parameter]], list[nn.Parameter]],
) -> Callable[[torch.optim.Optimizer, Iterable[nn.Parameter]], list[nn.Parameter]]:
    """Compare by identity: Lightning compares values, by which all empty shards are equal."""

    @functools.wraps(former)
    def filter_on_optimizer(
        optimizer: torch.optim.Optimizer, params: Iterable[nn.Parameter]
    ) -> list[nn.Parameter]:
        given = list(params)
        if all(get_info(parameter) is None for parameter in given):
            return former(optimizer, given)
        held = {id(each) for group in optimizer.param_groups for each in group["params"]}
        left = [parameter for parameter in given if id(parameter) not in held]
        if len(left) < len(given):
            rank_zero_warn(
                f"{len(given) - len(left)} of {len(given)} parameters to be added are in this "
                f"{type(optimizer).__name__} already and are skipped; build the optimizer from "
                "(p for p in self.parameters() if p.requires_grad) in configure_optimizers"
            )
        return left

    setattr(filter_on_optimizer, _PATCHED, True)
    return filter_on_optimizer


def _in_full(former: property, model_of: str, only_trainable: bool) -> property:
    def counted(self: Any) -> Any:
        model = getattr(self, model_of)
        if is_sharded(model):
            return count(model.parameters(), only_trainable)
        return former.__get__(self)

    return property(counted, doc=former.__doc__)
