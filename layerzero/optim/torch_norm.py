"""Makes torch's `clip_grad_norm_` and `get_total_norm` right for sharded parameters.

Both compute their norm by one helper, which torch looks up in its module at each call. `install`
replaces it once per process: of gradients (or values) of sharded parameters it returns the norm
over all ranks, as `fully_shard`'s DTensors do; anything else goes to torch's own helper. See
docs/internals/decisions/0024-torchs-gradient-norm-is-the-global-one.md.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn.utils import clip_grad

from layerzero.optim.sharded_params import by_tensor

_MARK = "_layerzero_global"


def install() -> None:
    """Replace the helper, unless it was replaced before."""
    former = clip_grad._get_total_norm
    if hasattr(former, _MARK):
        return

    @functools.wraps(former)
    def total_norm(
        tensors: Any,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        # A compiled caller traces torch's own code; Dynamo cannot look up who owns a tensor.
        known = {} if torch.compiler.is_compiling() else by_tensor()
        if not any(id(tensor) in known for tensor in tensors):
            return former(tensors, norm_type, error_if_nonfinite, foreach)
        from layerzero.optim.norm import global_norm

        like = [known.get(id(tensor), tensor) for tensor in tensors]
        norm = global_norm(tensors, norm_type, like=like)
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(
                f"the norm of order {float(norm_type)} over all ranks is {norm.item()}, so "
                "gradients cannot be clipped by it; pass error_if_nonfinite=False to scale them "
                "all the same"
            )
        return norm

    setattr(total_norm, _MARK, True)
    clip_grad._get_total_norm = total_norm
    torch.nn.utils.get_total_norm = total_norm
