"""Warns when torch's gradient norm is computed over sharded parameters: it covers only this rank.

`torch.nn.utils.clip_grad_norm_` looks up its helper in the globals of its module at each call. So
replacing the helper reaches all calls, also through functions imported earlier. The replacement
computes what torch does, and removes itself after one warning.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils import clip_grad

from layerzero.notices import warn_once
from layerzero.optim import attach, norms_by_hand
from layerzero.runtime.sharded_params import Owner, owner_of_each

_LOOKS = "_layerzero_looks"


@attach.on_sharded_params
def look(optimizer: torch.optim.Optimizer | None = None) -> None:
    """Install the check. Few clip gradients before an optimizer has sharded parameters."""
    for owner, name, caller, instead in (
        (clip_grad, "_get_total_norm", "clip_grad_norm_", "model.clip_grad_norm_(max_norm)"),
        (torch.nn.utils, "get_total_norm", "get_total_norm", "layerzero.global_norm(model)"),
    ):
        former = getattr(owner, name, None)
        if former is not None and not hasattr(former, _LOOKS):
            setattr(owner, name, _looking(former, owner, name, caller, instead))


def _looking(
    former: Callable[..., torch.Tensor], module: Any, name: str, caller: str, instead: str
) -> Callable[..., torch.Tensor]:
    @functools.wraps(former)
    def norm(tensors: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
            owner = _owner_of_any(tensors)
            if owner is not None:
                setattr(module, name, former)
                norms_by_hand.end()  # torch takes them by the functions that this looks at.
                warn_once(
                    caller,
                    f"torch.nn.utils.{caller} was given sharded parameters: its norm is that of "
                    f"this rank's shards, and differs between ranks. Use {instead}, which is the "
                    "same on all ranks; call it on every rank",
                    is_first=owner.issues_warnings,
                    stacklevel=4,
                )
        return former(tensors, *args, **kwargs)

    setattr(norm, _LOOKS, True)
    return norm


def _owner_of_any(tensors: list[Any]) -> Owner | None:
    """Owner of the first sharded parameter, or its `.grad`, in `tensors` that is only a part."""
    given = {id(tensor) for tensor in tensors}
    for owner in owner_of_each().values():
        is_part = owner.placement.num_main_shards > 1 or owner.is_tensor_parallel
        if is_part and (id(owner.sharded_param) in given or id(owner.sharded_param.grad) in given):
            return owner
    return None
