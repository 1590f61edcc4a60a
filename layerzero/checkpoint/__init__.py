"""Checkpoints: every rank writes and reads its own pieces of plain safetensors files.

`save` and `load` are all a training run needs; docs/reference/checkpoint_format.md describes the
files.
The four `*_state_dict` functions speak to torch.distributed.checkpoint and to code that wants full
tensors; `stream_full` hands weights to an inference engine.
"""

from layerzero.checkpoint.loading import load
from layerzero.checkpoint.save_handle import SaveHandle
from layerzero.checkpoint.saving import save
from layerzero.state_dict.errors import CheckpointError
from layerzero.state_dict.get_state_dict import get_model_state_dict, get_optimizer_state_dict
from layerzero.state_dict.parameter_shard import ParameterShard
from layerzero.state_dict.set_state_dict import set_model_state_dict, set_optimizer_state_dict
from layerzero.state_dict.stream import stream_full

__all__ = [
    "CheckpointError",
    "ParameterShard",
    "SaveHandle",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "load",
    "save",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "stream_full",
]
