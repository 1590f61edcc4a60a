"""Optimizer-side operations that need more than this rank's sharded parameters to be right.

An element-wise optimizer (SGD, Adam, AdamW, ...) needs nothing from here. Norms, rules by shape and
decisions that all ranks share do.
"""

# Imported for their effect: they register functions for optimizers of sharded parameters.
from layerzero.optim import after_failure as after_failure
from layerzero.optim.adamw import AdamW
from layerzero.optim.decay import decay_groups
from layerzero.optim.nonempty import nonempty_parameters
from layerzero.optim.norm import global_norm
from layerzero.optim.scaler import GradScaler
from layerzero.optim.sgd_and_lion import SGD, Lion
from layerzero.optim.whole_tensor import WholeTensorOptimizer

__all__ = [
    "SGD",
    "AdamW",
    "GradScaler",
    "Lion",
    "WholeTensorOptimizer",
    "decay_groups",
    "global_norm",
    "nonempty_parameters",
]
