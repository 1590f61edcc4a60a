"""The interface for adapters to other frameworks, in addition to `layerzero.checkpoint`.

A change to one of these names affects every adapter; everything else in `checkpoint/` and
`state_dict/` is internal, which `tests/unit/test_imports.py` enforces.
"""

# Every import is an export.
# ruff: noqa: F401
# mypy: implicit-reexport

from layerzero.checkpoint.format.folder import committed_steps
from layerzero.checkpoint.format.inventory import MODEL
from layerzero.checkpoint.source import open_source
from layerzero.experts.names import global_name, under_global_names
from layerzero.state_dict.checkpoint_group import checkpoint_group_of
from layerzero.state_dict.json_codec import decode
from layerzero.state_dict.names import Names, named_buffers
from layerzero.state_dict.optimizer_state import put_state, state_template
from layerzero.state_dict.optimizers import keeps_whole_states
from layerzero.state_dict.preconditions import refuse_experts, root_states_of
from layerzero.state_dict.ranges import Box, Extent, boxes
