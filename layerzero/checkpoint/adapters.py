"""What adapters to other frameworks may rely on beside `layerzero.checkpoint` itself.

Whoever changes one of these changes every adapter; all else in `checkpoint/` and `state_dict/` is
theirs alone. `tests/unit/test_imports.py` holds adapters to it.

    names       `Names`, `named_buffers`, `name_in_group`, `global_name`, `under_global_names`: what
                parameters and buffers are called in checkpoints
    pieces      `piece_of`: this rank's part of a full tensor; `Extent`, `boxes`, `Box`: where a
                piece lies in the whole
    optimizers  `state_template`, `put_state`: state by parameter, out and in
    ranks       `root_state_of`, `refuse_experts`: when a model may be saved; `participants_of`:
                what the ranks tell each other
    values      `encode`, `decode`: Python values as JSON
    files       `committed_steps`, `LATEST`, `open_source`: what is there; `plan_files`,
                `Announcement`, `MODEL`, `bytes_of`, `write_durably`, `sync_folder`: to write
                safetensors files of one's own
    errors      `some`: the first few of many names
"""

from __future__ import annotations

from layerzero.checkpoint.file_io.direct_io import bytes_of
from layerzero.checkpoint.format.file_plan import Announcement, plan_files
from layerzero.checkpoint.format.folder import LATEST, committed_steps, sync_folder, write_durably
from layerzero.checkpoint.format.inventory import MODEL
from layerzero.checkpoint.source import open_source
from layerzero.state_dict.errors import some
from layerzero.state_dict.expert_names import global_name, under_global_names
from layerzero.state_dict.json_codec import decode, encode
from layerzero.state_dict.module_state import piece_of
from layerzero.state_dict.names import Names, name_in_group, named_buffers
from layerzero.state_dict.optimizer_state import put_state, state_template
from layerzero.state_dict.participants import participants_of
from layerzero.state_dict.preconditions import refuse_experts, root_state_of
from layerzero.state_dict.ranges import Box, Extent, boxes

__all__ = [
    "LATEST",
    "MODEL",
    "Announcement",
    "Box",
    "Extent",
    "Names",
    "boxes",
    "bytes_of",
    "committed_steps",
    "decode",
    "encode",
    "global_name",
    "name_in_group",
    "named_buffers",
    "open_source",
    "participants_of",
    "piece_of",
    "plan_files",
    "put_state",
    "refuse_experts",
    "root_state_of",
    "some",
    "state_template",
    "sync_folder",
    "under_global_names",
    "write_durably",
]
