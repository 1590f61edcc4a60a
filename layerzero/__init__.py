"""layerzero: ZeRO-3 on flat parameters for PyTorch.

`ZeRO3(module, ...)` shards a module's parameters, gradients and optimizer state over the ranks of
a process group. See README.md for its use, docs/internals/life_of_a_parameter.md for how it works.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from layerzero import errors, optim
from layerzero.config import (
    BackwardPrefetch,
    MixedPrecision,
    OffloadPolicy,
    PrefetchPolicy,
    ReductionPolicy,
)
from layerzero.fully_shard import (
    FSDPModule,
    fully_shard,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from layerzero.model_functions import pregather, register_forward_method, units
from layerzero.ops import native_status
from layerzero.optim import GradScaler, global_norm
from layerzero.parallel import ParallelManager
from layerzero.plan import ActivationCheckpointing, ShardingPlan, shard_with_plan
from layerzero.rewrap import rewrap
from layerzero.step.states import Hold
from layerzero.uneven.context import join
from layerzero.version import __version__
from layerzero.watch.diagnosis import CollectiveError
from layerzero.zero3 import ZeRO3

if TYPE_CHECKING:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    from layerzero import checkpoint
    from layerzero.memory_plan import plan_memory
    from layerzero.step_ledger import ledger

__all__ = [
    "ActivationCheckpointing",
    "BackwardPrefetch",
    "CPUOffloadPolicy",
    "CollectiveError",
    "FSDPModule",
    "GradScaler",
    "Hold",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ParallelManager",
    "PrefetchPolicy",
    "ReductionPolicy",
    "ShardingPlan",
    "ZeRO3",
    "__version__",
    "checkpoint",
    "errors",
    "fully_shard",
    "global_norm",
    "join",
    "ledger",
    "native_status",
    "optim",
    "plan_memory",
    "pregather",
    "register_forward_method",
    "register_fsdp_forward_method",
    "rewrap",
    "shard_with_plan",
    "share_comm_ctx",
    "units",
]


def __getattr__(name: str) -> Any:
    # Imported on first use: training alone needs none of these.
    if name == "checkpoint":
        return importlib.import_module("layerzero.checkpoint")
    if name == "plan_memory":
        return importlib.import_module("layerzero.memory_plan").plan_memory
    if name == "ledger":
        return importlib.import_module("layerzero.step_ledger").ledger
    if name in ("CPUOffloadPolicy", "MixedPrecisionPolicy"):  # torch's own.
        return getattr(importlib.import_module("torch.distributed.fsdp"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
