"""Warns of a norm that a program takes of a shard, or of its gradient, as if it were whole.

    total = torch.stack([p.grad.norm() for p in model.parameters()]).norm()    # to clip, to log
    scale = 0.05 / total                                                       # SAM, LARS, AGC

Each rank gets the norm of its part, another one than its peers, and nothing fails. `Tensor.norm`,
`torch.norm` and `nn.functional.normalize` call `torch.linalg.vector_norm`, which they look up each
time, so replacing three functions reaches what programs write. They compute what they did, and come
back after one warning.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.jit._builtins import _register_builtin

from layerzero.notices import outside, warn_once, was_issued
from layerzero.optim import attach
from layerzero.runtime.sharded_params import Owner
from layerzero.runtime.shards_in_collectives import owners_of_part

foreach_norm = torch._foreach_norm
"""torch's own, for the engine, which takes norms of parts and adds them over ranks."""
_FUNCTIONS = (
    (torch.linalg, "norm", "aten::linalg_norm"),
    (torch.linalg, "vector_norm", "aten::linalg_vector_norm"),
    (torch, "_foreach_norm", "aten::_foreach_norm"),
)
"""Where each is, and the operator that TorchScript compiles it to, which it knows by its id."""
_PLAIN = "_layerzero_plain"


@attach.on_sharded_params
def look(optimizer: torch.optim.Optimizer | None = None) -> None:
    """Install the check, unless it has warned."""
    if was_issued("norm by hand"):
        return
    for module, name, operator in _FUNCTIONS:
        plain = getattr(module, name)
        if not hasattr(plain, _PLAIN):
            looking = _looking(plain)
            _register_builtin(looking, operator)
            setattr(module, name, looking)


def end() -> None:
    """Put torch's functions back: norms of shards have been warned of."""
    for module, name, _ in _FUNCTIONS:
        plain = getattr(getattr(module, name), _PLAIN, None)
        if plain is not None:
            setattr(module, name, plain)


def _looking(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def norm(*args: Any, **kwargs: Any) -> Any:
        if args and not torch.compiler.is_compiling():
            of = args[0]
            for each in of if isinstance(of, (list, tuple)) else (of,):
                owner = _owner(each)
                if owner is not None and not _told_by_its_optimizer():
                    end()
                    warn_once(
                        "norm by hand",
                        "a norm was taken of a sharded parameter or its gradient: it is that of "
                        "this rank's part, and differs between ranks. For all gradients use "
                        "layerzero.global_norm(model) or model.clip_grad_norm_(max_norm), for one "
                        "parameter layerzero.global_norm(p) or global_norm(p.grad), on every rank",
                        is_first=owner.issues_warnings,
                        stacklevel=outside(),
                    )
                    break
        return plain(*args, **kwargs)

    setattr(norm, _PLAIN, plain)
    return norm


def _owner(tensor: Any) -> Owner | None:
    if type(tensor) is not torch.Tensor and not isinstance(tensor, nn.Parameter):
        return None
    if tensor.dim() != 1 or not tensor.numel():  # Parts and their gradients are 1-D.
        return None
    try:
        for owner in owners_of_part(tensor):
            if owner.placement.num_main_shards > 1 or owner.is_tensor_parallel:
                return owner
    except RuntimeError:  # Tensors inside a transform have no address.
        pass
    return None


def _told_by_its_optimizer() -> bool:
    """Whether an optimizer takes the norm in its step, and has been warned of as such."""
    frame = sys._getframe(2)
    while frame.f_back is not None:
        frame = frame.f_back
        optimizer = frame.f_locals.get("self")
        if isinstance(optimizer, torch.optim.Optimizer):
            return was_issued(f"not element-wise: {type(optimizer).__name__}")
    return False
