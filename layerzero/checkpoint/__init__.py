"""Checkpoints: every rank writes and reads its own shards in plain safetensors files.

A training run needs only `save` and `load`; docs/reference/checkpoint_format.md describes the
files. The four `*_state_dict` functions are for torch.distributed.checkpoint and for code that
wants full tensors; `stream_full` passes weights to an inference engine, and `DeltaStream` only
what changed of them.
"""

from layerzero.checkpoint.delta.apply import apply_delta
from layerzero.checkpoint.delta.patch import DeltaError, Patch
from layerzero.checkpoint.delta.stream import DeltaStream
from layerzero.checkpoint.loading import load
from layerzero.checkpoint.saving import SaveHandle, save
from layerzero.errors import CheckpointError
from layerzero.state_dict.full_tensors import stream_full
from layerzero.state_dict.parameter_shard import ParameterShard
from layerzero.state_dict.state_dicts import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

__all__ = [
    "CheckpointError",
    "DeltaError",
    "DeltaStream",
    "ParameterShard",
    "Patch",
    "SaveHandle",
    "apply_delta",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "load",
    "save",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "stream_full",
]
