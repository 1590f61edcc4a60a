"""Optimizer-side operations that need more than this rank's sharded parameters to be right.

An element-wise optimizer (SGD, Adam, AdamW, ...) needs nothing from here. Norms, rules by shape and
decisions that all ranks share do.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from layerzero.optim.adamw import AdamW
    from layerzero.optim.decay import decay_groups
    from layerzero.optim.norm import global_norm
    from layerzero.optim.scaler import GradScaler
    from layerzero.optim.whole_tensor import WholeTensorOptimizer

_LAZY = {
    "AdamW": "adamw",
    "GradScaler": "scaler",
    "WholeTensorOptimizer": "whole_tensor",
    "decay_groups": "decay",
    "global_norm": "norm",
}
"""File of each name, imported on first use."""

__all__ = [
    "AdamW",
    "GradScaler",
    "WholeTensorOptimizer",
    "decay_groups",
    "global_norm",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
