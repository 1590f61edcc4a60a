"""Sharding configured by name patterns: `ShardingPlan`, `shard_with_plan`.

See docs/reference/plans.md.
"""

from layerzero.plan.activations import ActivationCheckpointing
from layerzero.plan.shard import shard_with_plan
from layerzero.plan.sharding_plan import ShardingPlan

__all__ = ["ActivationCheckpointing", "ShardingPlan", "shard_with_plan"]
