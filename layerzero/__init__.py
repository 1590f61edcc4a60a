"""layerzero: ZeRO-3 on flat parameters for PyTorch.

`ZeRO3(module, ...)` shards a module's parameters, gradients and optimizer state over the ranks of
a process group. See README.md, and docs/life_of_a_parameter.md for how it works inside.
"""

from layerzero import checkpoint
from layerzero.comm.diagnosis import CollectiveError
from layerzero.config import BackwardPrefetch, MixedPrecision, OffloadPolicy
from layerzero.ops import native_status
from layerzero.optim.scaler import GradScaler
from layerzero.parallel import ParallelManager
from layerzero.plan import ShardingPlan, shard_with_plan
from layerzero.zero3 import ZeRO3, register_forward_method, units

__version__ = "0.1.0"

__all__ = [
    "BackwardPrefetch",
    "CollectiveError",
    "GradScaler",
    "MixedPrecision",
    "OffloadPolicy",
    "ParallelManager",
    "ShardingPlan",
    "ZeRO3",
    "checkpoint",
    "native_status",
    "register_forward_method",
    "shard_with_plan",
    "units",
]
