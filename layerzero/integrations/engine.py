"""The interface of the engine for adapters to other frameworks, beside the public one.

Adapters use `layerzero`, `layerzero.config`, `layerzero.checkpoint`, `checkpoint.adapters`
and the names below; everything else is internal, which `tests/unit/test_imports.py` enforces.

    parameters  `get_info`, `ParameterInfo`: the original of a sharded parameter, and this rank's
                range of it; `copy_attributes`; `TensorParallelSplit`, `local_of`, `split_of`:
                DTensors; `clean_name`, `WRAPPER_NAMES`: names without what wrappers add;
                `refuse_pieces`: shards that would be saved as if whole
    units       `get_unit`, `root_of`, `ordered_units`, `RootState`, `FlatParamHandle`; their states
                `ShardState` and `TrainingState`; `WrapPolicy`, `Choice`, `make_chooser`,
                `has_forward`: which modules become units; `summon`, `SummonOptions`,
                `units_inside`: full parameters of some units
    ranks       `ShardGroup`, `Placement`, `make_shard_group`, `new_group`,
                `resolve_process_groups`; `Operation`, `gather_small`, `broadcast_`,
                `broadcast_from_first`: collectives
    devices     `current_accelerator`, `check_device_type`: which can be used
    optimizers  `attach`: functions called for each optimizer of sharded parameters;
                `clip_grad_norm_`, `clip_factor`, `clipped`
    plans       `NamePattern`, `optional_by_name`, `load_yaml`, `read_plan_options`,
                `merge_precision`, `near_matches`, `split_act_ckpt`, `is_mode`, and the names of
                options
    messages    `warn_once`, `is_first_rank`, `list_names`
"""

from __future__ import annotations

from layerzero.build.device import check_device_type, current_accelerator
from layerzero.build.wrap import Choice, WrapPolicy, has_forward, make_chooser
from layerzero.comm.collectives import broadcast_, broadcast_from_first, gather_small
from layerzero.comm.new_groups import new_group
from layerzero.comm.pending import Operation
from layerzero.flat.groups import ShardGroup, make_shard_group, resolve_process_groups
from layerzero.flat.names import WRAPPER_NAMES, clean_name
from layerzero.flat.parameter_info import ParameterInfo, copy_attributes, get_info
from layerzero.flat.placement import Placement
from layerzero.flat.tensor_parallel import TensorParallelSplit, local_of, split_of
from layerzero.notices import is_first_rank, warn_once
from layerzero.optim import attach
from layerzero.optim.clip import clip_factor, clip_grad_norm_, clipped
from layerzero.plan.activations import is_mode, split_act_ckpt
from layerzero.plan.options import (
    MODULE_OPTIONS,
    PRECISION_OPTIONS,
    ZERO3_OPTIONS,
    merge_precision,
    near_matches,
)
from layerzero.plan.options import read_options as read_plan_options
from layerzero.plan.patterns import NamePattern
from layerzero.plan.resolve import names as list_names
from layerzero.plan.resolve import optional_by_name
from layerzero.plan.sharding_plan import load_yaml
from layerzero.state_dict.foreign_methods import refuse_pieces
from layerzero.step.handle import FlatParamHandle
from layerzero.step.root import RootState, ordered_units, root_of
from layerzero.step.states import ShardState, TrainingState
from layerzero.step.summon import SummonOptions, summon
from layerzero.step.unit import get_unit
from layerzero.step.unwrap import units_inside

__all__ = [
    "MODULE_OPTIONS",
    "PRECISION_OPTIONS",
    "WRAPPER_NAMES",
    "ZERO3_OPTIONS",
    "Choice",
    "FlatParamHandle",
    "NamePattern",
    "Operation",
    "ParameterInfo",
    "Placement",
    "RootState",
    "ShardGroup",
    "ShardState",
    "SummonOptions",
    "TensorParallelSplit",
    "TrainingState",
    "WrapPolicy",
    "attach",
    "broadcast_",
    "broadcast_from_first",
    "check_device_type",
    "clean_name",
    "clip_factor",
    "clip_grad_norm_",
    "clipped",
    "copy_attributes",
    "current_accelerator",
    "gather_small",
    "get_info",
    "get_unit",
    "has_forward",
    "is_first_rank",
    "is_mode",
    "list_names",
    "load_yaml",
    "local_of",
    "make_chooser",
    "make_shard_group",
    "merge_precision",
    "near_matches",
    "new_group",
    "optional_by_name",
    "ordered_units",
    "read_plan_options",
    "refuse_pieces",
    "resolve_process_groups",
    "root_of",
    "split_act_ckpt",
    "split_of",
    "summon",
    "units_inside",
    "warn_once",
]
