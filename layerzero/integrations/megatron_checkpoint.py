"""Megatron's distributed checkpoints: see docs/reference/megatron_checkpoints.md."""

from layerzero.integrations.megatron.checkpoint import (
    load_main_parameters,
    load_model_state_dict,
    sharded_state_dict,
)
from layerzero.integrations.megatron.optimizer_checkpoint import (
    load_optimizer_state_dict,
    optimizer_sharded_state_dict,
)

__all__ = [
    "load_main_parameters",
    "load_model_state_dict",
    "load_optimizer_state_dict",
    "optimizer_sharded_state_dict",
    "sharded_state_dict",
]
