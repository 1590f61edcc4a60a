"""Checkpoints: every rank writes and reads its own pieces of plain safetensors files.

`save` and `load` are all a training run needs; docs/checkpoint_format.md says what is on the disk.
"""

from layerzero.checkpoint.errors import CheckpointError
from layerzero.checkpoint.handle import SaveHandle
from layerzero.checkpoint.load import load
from layerzero.checkpoint.save import save

__all__ = ["CheckpointError", "SaveHandle", "load", "save"]
