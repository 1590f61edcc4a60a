"""Megatron's distributed checkpoints of a sharded model: each rank writes and reads its own shards.

Names, global shapes and offsets are those of the unsharded model's `sharded_state_dict`, so
`megatron.core.dist_checkpointing` writes one format for both. A checkpoint of Megatron's own data
parallelism loads into a sharded model and vice versa, at any sizes of data-parallel, shard,
tensor-parallel and pipeline groups. shards.py explains how.
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
from layerzero.integrations.engine import ordered_units
from layerzero.integrations.megatron.shards import shard_entry, stand_ins

StateDict = dict[str, Any]


def sharded_state_dict(
    engine: ZeRO3,
    prefix: str = "",
    sharded_offsets: Sequence[tuple[int, int, int]] = (),
    metadata: StateDict | None = None,
    tp_group: dist.ProcessGroup | None = None,
) -> StateDict:
    """A model chunk's state dict for `megatron.core.dist_checkpointing`. Not collective.

    Entries share memory with the parameters, so `dist_checkpointing.load` writes into them; then
    call `load_model_state_dict`. Parameters are in the dtype of the main shards.

    Args:
        engine: a sharded module, between steps. For a module without a `sharded_state_dict`,
            Megatron's default applies: the same values on all tensor-parallel ranks.
        prefix, sharded_offsets, metadata: as for Megatron's `sharded_state_dict`.
        tp_group: tensor-parallel ranks, for such modules; None: those of Megatron's global state.

    Raises:
        ValueError: the model is not sharded over Megatron's data-parallel ranks.
        NotImplementedError: a parameter is a DTensor, or a module derives new tensors from
            parameters for its sharded state dict, so that a rank cannot find its shard in them.
        RuntimeError: the model is in backward, or inside `summon_full_params`.
    """
    root = root_state_of(engine, "sharded_state_dict")
    if any(unit.training_state.name == "SUMMON_FULL_PARAMS" for unit in root.units):
        raise RuntimeError(
            "sharded_state_dict: inside summon_full_params the shards may be older than the full "
            "parameters; leave the context first"
        )
    given = {} if metadata is None else metadata
    group = given.get("dp_cp_group")
    if group is None:
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    _check_group(engine, group)
    with stand_ins(engine) as shards:
        entries = sharded_state_dict_default(
            engine.module,
            prefix,
            tuple(sharded_offsets),
            {**given, "dp_cp_group": group},
            tp_group,
        )
        return {name: shard_entry(entry, shards) for name, entry in entries.items()}


def load_model_state_dict(
    engine: ZeRO3, state_dict: Mapping[str, Any], strict: bool = True
) -> None:
    """Load what `dist_checkpointing.load` returned for `sharded_state_dict(engine)`.

    Not collective.

    Args:
        engine: the model that the sharded state dict was made from.
        state_dict: this rank's shards by the module's names; or full tensors of the local
            (tensor-parallel) shapes, as in older checkpoints of Megatron.
        strict: raise for missing and unexpected names.

    Raises:
        RuntimeError: names or shapes do not fit.
    """
    root_state_of(engine, "load_model_state_dict")
    # Called on the module itself: wrappers such as Float16Module may drop a part of the names.
    engine.module.load_state_dict(under_global_names(engine.module, state_dict), strict=strict)


def load_main_parameters(engine: ZeRO3, checkpoint_dir: str) -> bool:
    """Load the float32 weights that Megatron's optimizers for 16-bit models save with their state.

    Call it after `load_model_state_dict`, which gets only 16-bit values from such a checkpoint.
    Collective over all ranks, like `dist_checkpointing.load`.

    Returns:
        Whether the checkpoint has float32 weights; if not, the model is unchanged.
    """
    saved = dist_checkpointing.load_tensors_metadata(checkpoint_dir).keys()
    prefix = next((p for p in _MAIN if any(name.startswith(p) for name in saved)), None)
    if prefix is None:
        return False
    wanted: StateDict = {}
    for name, place in sharded_state_dict(engine).items():
        if isinstance(place, ShardedTensorFactory):
            key = prefix + place.key
            if key in saved or f"{key}_w" in saved:  # _w: gated layers save two halves
                wanted[name] = replace(place, key=key)
    loaded = dist_checkpointing.load({_WANTED: wanted}, checkpoint_dir)
    load_model_state_dict(engine, loaded.get(_WANTED, {}), strict=False)
    return True


_MAIN = ("optimizer.state.fp32_param.", "optimizer.state.param.")
"""Prefixes of float32 weights: of Megatron's plain and of its distributed optimizer."""
_WANTED = "main_parameters"
"""Key that keeps the weights apart from the common state, which `load` returns as well."""


def _check_group(engine: ZeRO3, group: dist.ProcessGroup) -> None:
    """Raise if a unit is not sharded over exactly these ranks: the checkpoint would have holes."""
    expected = sorted(dist.get_process_group_ranks(group))
    for unit in ordered_units(engine):
        for handle in unit.handles:
            placement = handle.placement.data_parallel or handle.placement
            if sorted(placement.members) != expected:
                raise ValueError(
                    f"sharded_state_dict: {unit.label} (rank {dist.get_rank()}) is sharded over "
                    f"ranks {list(placement.members)}, expected Megatron's data-parallel ranks "
                    f"{expected}: pass ZeRO3 the process_group parallel_state."
                    "get_data_parallel_group(with_context_parallel=True)"
                )
