"""Megatron's distributed checkpoints of a sharded model: each rank writes and reads its own pieces.

Names, global shapes and offsets are those that the unsharded model's `sharded_state_dict` gives, so
`megatron.core.dist_checkpointing` writes one format for both: a checkpoint of Megatron's own
data parallelism loads into a sharded model, the other way round too, and either at other sizes of
data-parallel, shard, tensor-parallel and pipeline groups. megatron_pieces.py says how.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.transformer.utils import sharded_state_dict_default

from layerzero import ZeRO3
from layerzero.checkpoint.adapters import root_state_of, under_global_names
from layerzero.integrations.megatron.optimizer_checkpoint import (
    load_optimizer_state_dict,
    optimizer_sharded_state_dict,
)
from layerzero.integrations.megatron.pieces import entry_of_piece, stand_ins
from layerzero.runtime.root import ordered_units
from layerzero.runtime.states import TrainingState

__all__ = [
    "load_main_parameters",
    "load_model_state_dict",
    "load_optimizer_state_dict",
    "optimizer_sharded_state_dict",
    "sharded_state_dict",
]

StateDict = dict[str, Any]


def sharded_state_dict(
    engine: ZeRO3,
    prefix: str = "",
    sharded_offsets: Sequence[tuple[int, int, int]] = (),
    metadata: StateDict | None = None,
    tp_group: dist.ProcessGroup | None = None,
) -> StateDict:
    """What `megatron.core.dist_checkpointing` saves and loads of a model chunk. Not collective.

    Entries share memory with the parameters, so `dist_checkpointing.load` writes into them; then
    call `load_model_state_dict`. Parameters are in the dtype of the main shards.

    Args:
        engine: a sharded module, between steps. One without a `sharded_state_dict` of its own is
            described by Megatron's default: the same on all tensor-parallel ranks.
        prefix, sharded_offsets, metadata: as of Megatron's `sharded_state_dict`.
        tp_group: tensor-parallel ranks, for such modules; None: those of Megatron's global state.

    Raises:
        ValueError: the model is not sharded over Megatron's data-parallel ranks.
        NotImplementedError: a parameter is a DTensor, or a module makes new tensors of parameters
            for its sharded state dict, of which a rank with a piece cannot know its part.
        RuntimeError: the model is in backward, or inside `summon_full_params`.
    """
    root = root_state_of(engine, "sharded_state_dict")
    if any(unit.training_state is TrainingState.SUMMON_FULL_PARAMS for unit in root.units):
        raise RuntimeError(
            "sharded_state_dict: inside summon_full_params the pieces may be older than the full "
            "parameters; leave it first"
        )
    given = {} if metadata is None else metadata
    group = given.get("dp_cp_group")
    if group is None:
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    _check_group(engine, group)
    with stand_ins(engine) as pieces:
        entries = sharded_state_dict_default(
            engine.module,
            prefix,
            tuple(sharded_offsets),
            {**given, "dp_cp_group": group},
            tp_group,
        )
        return {name: entry_of_piece(entry, pieces) for name, entry in entries.items()}


def load_model_state_dict(
    engine: ZeRO3, state_dict: Mapping[str, Any], strict: bool = True
) -> None:
    """Load what `dist_checkpointing.load` gave for `sharded_state_dict(engine)`. Not collective.

    Args:
        engine: the model that the sharded state dict was of.
        state_dict: by the module's own names, pieces of this rank; or full tensors of the local
            (tensor-parallel) shapes, as older checkpoints of Megatron have them.
        strict: raise for missing and unexpected names.

    Raises:
        RuntimeError: names or shapes do not fit.
    """
    root_state_of(engine, "load_model_state_dict")
    # The module's own method: one around it (Float16Module) may drop its part of the names.
    engine.module.load_state_dict(under_global_names(engine.module, state_dict), strict=strict)


def load_main_parameters(engine: ZeRO3, checkpoint_dir: str) -> bool:
    """Load the float32 weights that Megatron's optimizers of 16-bit models save beside the model.

    After `load_model_state_dict`, which of such a checkpoint gave 16-bit values alone. Collective
    over all ranks, as `dist_checkpointing.load` is.

    Returns:
        Whether there are any; the model is as it was if not.
    """
    saved = dist_checkpointing.load_tensors_metadata(checkpoint_dir).keys()
    prefix = next((p for p in _MAIN if any(name.startswith(p) for name in saved)), None)
    if prefix is None:
        return False
    wanted: StateDict = {}
    for name, place in sharded_state_dict(engine).items():
        if isinstance(place, ShardedTensorFactory):
            key = prefix + place.key
            if key in saved or f"{key}_w" in saved:  # of halves saved apart (gated layers)
                wanted[name] = replace(place, key=key)
    loaded = dist_checkpointing.load({_WANTED: wanted}, checkpoint_dir)
    load_model_state_dict(engine, loaded.get(_WANTED, {}), strict=False)
    return True


_MAIN = ("optimizer.state.fp32_param.", "optimizer.state.param.")
"""Before the names of float32 weights: of Megatron's optimizer, of its distributed one."""
_WANTED = "main_parameters"
"""Apart from the common state, which a load gives as well."""


def _check_group(engine: ZeRO3, group: dist.ProcessGroup) -> None:
    """Pieces are of all data-parallel ranks together, or the checkpoint would have holes."""
    expected = sorted(dist.get_process_group_ranks(group))
    for unit in ordered_units(engine):
        for handle in unit.handles:
            placement = handle.placement.data_parallel or handle.placement
            if sorted(placement.members) != expected:
                raise ValueError(
                    f"sharded_state_dict: {unit.label} (rank {dist.get_rank()}) is sharded over "
                    f"ranks {list(placement.members)}, expected Megatron's data-parallel ranks "
                    f"{expected}: give ZeRO3 the process_group parallel_state."
                    "get_data_parallel_group(with_context_parallel=True)"
                )
