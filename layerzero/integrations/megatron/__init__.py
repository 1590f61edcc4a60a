"""Megatron on layerzero: sharded model chunks, and the optimizer for their parameters.

Megatron's schedules, models and `finalize_model_grads` run unchanged. See
docs/reference/megatron.md.
"""

from layerzero.integrations.megatron.data_parallel import ZeRO3DataParallel
from layerzero.integrations.megatron.optimizer import ZeRO3Optimizer, get_zero3_optimizer
from layerzero.integrations.megatron.setup import setup_model_and_optimizer

__all__ = [
    "ZeRO3DataParallel",
    "ZeRO3Optimizer",
    "get_zero3_optimizer",
    "setup_model_and_optimizer",
]
