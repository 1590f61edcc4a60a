"""Whole states of a WholeTensorOptimizer in Megatron's distributed checkpoints.

Each is one ShardedObject, which its owner writes, and reads at any number of data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch import nn

from layerzero.checkpoint import CheckpointError
from layerzero.checkpoint.adapters import (
    keeps_whole_states,
    parameters_with_state,
    put_state,
)
from layerzero.integrations.engine import some
from layerzero.integrations.megatron.several import parameters_in

WHOLE_STATES = "whole_states"
"""Key of whole states in an optimizer's state dict."""
StateDict = dict[str, Any]


def refuse_split_parameters(
    optimizers: Sequence[torch.optim.Optimizer], tensor_parallel_size: int, names: Mapping[int, str]
) -> None:
    """Raise NotImplementedError if a parameter is split over tensor-parallel ranks, so that no rank
    has it whole. `names`: of the parameters, by id."""
    split = [
        names.get(id(parameter), "a parameter")
        for optimizer in optimizers
        if tensor_parallel_size > 1 and keeps_whole_states(optimizer)
        for parameter in parameters_in(optimizer.param_groups)
        if getattr(parameter, "tensor_model_parallel", False)
    ]
    if split:
        raise NotImplementedError(
            f"make_optimizer: WholeTensorOptimizer needs whole tensors, but {some(split)} are "
            f"split over {tensor_parallel_size} tensor-parallel ranks; give them to an "
            "element-wise optimizer, or use tensor_model_parallel_size=1"
        )


def whole_state_entries(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str]
) -> dict[str, ShardedObject]:
    """An entry for each tensor that this rank owns, with or without state. Not collective."""
    stage = parallel_state.get_pipeline_model_parallel_rank()
    replica = parallel_state.get_tensor_model_parallel_rank()
    states: Any = optimizer.state
    entries = {}
    for parameter in parameters_with_state(optimizer):
        name = names[id(parameter)]
        key = f"optimizer.{WHOLE_STATES}.{stage}.{name}"
        state = dict(states.get(parameter, {}))
        entries[name] = ShardedObject(key, state, (1,), (0,), replica)
    return entries


def load_whole_states(
    optimizer: torch.optim.Optimizer,
    options: Sequence[Mapping[str, Any]],
    loaded: Mapping[str, Any],
    names: Mapping[int, str],
) -> None:
    """Load what was read for `whole_state_entries`. Not collective.

    Raises:
        CheckpointError: the state of a tensor that this rank owns is missing.
    """
    states: dict[nn.Parameter, StateDict] = {}
    missing = []
    for parameter in parameters_with_state(optimizer):
        name = names[id(parameter)]
        if name not in loaded:
            missing.append(name)
        elif loaded[name]:
            states[parameter] = loaded[name]
    if missing:
        raise CheckpointError(
            f"whole optimizer state was not loaded: {some(missing)}; pass the result of "
            "optimizer_sharded_state_dict(..., is_loading=True) to dist_checkpointing.load"
        )
    put_state(optimizer, options, states, exact=True)
