"""layerzero: ZeRO-3 on flat parameters for PyTorch.

`ZeRO3(module, ...)` shards a module's parameters, gradients and optimizer state over the ranks of
a process group. See README.md for its use, docs/internals/life_of_a_parameter.md for how it works.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from layerzero.config import BackwardPrefetch, MixedPrecision, OffloadPolicy, ReductionPolicy
from layerzero.errors import CollectiveError
from layerzero.ops import native_status
from layerzero.step.unit import Hold
from layerzero.version import __version__

if TYPE_CHECKING:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    from layerzero import checkpoint, errors, optim
    from layerzero.fsdp import (
        FSDPModule,
        fully_shard,
        register_fsdp_forward_method,
        share_comm_ctx,
    )
    from layerzero.graphs.capture import capture
    from layerzero.memory_plan import plan_memory
    from layerzero.optim import GradScaler, global_norm
    from layerzero.parallel import ParallelManager
    from layerzero.plan import ActivationCheckpointing, ShardingPlan, shard_with_plan
    from layerzero.step_ledger import ledger
    from layerzero.uneven.joinable import join
    from layerzero.wrapping.rewrap import rewrap
    from layerzero.wrapping.units import register_forward_method, units
    from layerzero.wrapping.zero3 import ZeRO3

_LAZY = {
    "ActivationCheckpointing": "layerzero.plan",
    "CPUOffloadPolicy": "torch.distributed.fsdp",
    "FSDPModule": "layerzero.fsdp",
    "GradScaler": "layerzero.optim",
    "MixedPrecisionPolicy": "torch.distributed.fsdp",
    "ParallelManager": "layerzero.parallel",
    "ShardingPlan": "layerzero.plan",
    "ZeRO3": "layerzero.wrapping.zero3",
    "capture": "layerzero.graphs.capture",
    "fully_shard": "layerzero.fsdp",
    "global_norm": "layerzero.optim",
    "join": "layerzero.uneven.joinable",
    "ledger": "layerzero.step_ledger",
    "plan_memory": "layerzero.memory_plan",
    "register_forward_method": "layerzero.wrapping.units",
    "register_fsdp_forward_method": "layerzero.fsdp",
    "rewrap": "layerzero.wrapping.rewrap",
    "share_comm_ctx": "layerzero.fsdp",
    "shard_with_plan": "layerzero.plan",
    "units": "layerzero.wrapping.units",
}
"""Module of each name that is imported on first use: what stands above the engine."""
_SUBMODULES = {"checkpoint", "optim", "parallel", "plan"}
"""Submodules that are imported on first use."""

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
    "ReductionPolicy",
    "ShardingPlan",
    "ZeRO3",
    "__version__",
    "capture",
    "checkpoint",
    "errors",
    "fully_shard",
    "global_norm",
    "join",
    "ledger",
    "native_status",
    "optim",
    "plan_memory",
    "register_forward_method",
    "register_fsdp_forward_method",
    "rewrap",
    "shard_with_plan",
    "share_comm_ctx",
    "units",
]


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return import_module(f"layerzero.{name}")
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_LAZY[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, *_SUBMODULES})
