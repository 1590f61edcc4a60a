"""Megatron's distributed checkpoints of a sharded model: each rank writes and reads its own shards.

Names, global shapes and offsets are those of the unsharded model's `sharded_state_dict`, so
`megatron.core.dist_checkpointing` writes one format for both. A checkpoint of Megatron's own data
parallelism loads into a sharded model and vice versa, at any sizes of data-parallel, shard,
tensor-parallel and pipeline groups.

Note [Boxes of named tensors]
    A sharded parameter is a range of the flattened parameter, which Megatron no longer supports (it
    refuses `flattened_range`). It does support blocks at any offset, so the range is split into
    boxes (state_dict/ranges.py), at most 2 n - 1 for n dimensions. A `ShardedTensorFactory` splits
    it, and joins the loaded boxes again. Like Megatron's own factories, it also serves optimizer
    state of the same shape.

Note [Stand-ins]
    While the modules build their sharded state dicts, their parameters are replaced by stand-ins on
    the meta device, of the original shapes. So nothing is all-gathered. A tensor in the result
    belongs to the stand-in whose storage it views.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.transformer.utils import sharded_state_dict_default
from torch import nn

from layerzero import ZeRO3
from layerzero.checkpoint.adapters import Extent, boxes, root_states_of, under_global_names
from layerzero.integrations.engine import copy_attributes, get_info, ordered_units

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
    root = root_states_of(engine, "sharded_state_dict")[0]
    if any(unit.training_state.name == "SUMMON_FULL_PARAMS" for unit in root.units):
        raise RuntimeError("sharded_state_dict: inside summon_full_params; leave the context first")
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
        return {name: _entry_of(entry, shards) for name, entry in entries.items()}


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
    root_states_of(engine, "load_model_state_dict")
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
                    f"sharded_state_dict: {unit.label} is sharded over ranks "
                    f"{list(placement.members)}, expected Megatron's data-parallel ranks "
                    f"{expected}: pass that group to ZeRO3"
                )


@dataclass(frozen=True)
class Shard:
    """A sharded parameter, with what is needed to find its range in the full one."""

    parameter: nn.Parameter
    info: Any
    """Its `ParameterInfo`: name, shape of the full parameter, this rank's range of it."""
    replica: int

    def meta(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(self.info.shape, dtype=dtype, device="meta")


class EmptyShard(LocalNonpersistentObject):
    """Stands for a parameter that this rank has no elements of: not saved, and loaded unchanged.

    Attributes:
        key: the parameter's key on ranks that have elements of it.
        data: the empty sharded parameter, as `data` in other entries.
    """

    def __init__(self, key: str, data: nn.Parameter) -> None:
        super().__init__(data.detach())
        self.key = key
        self.data = data


Shards = dict[int, Shard]
"""Keyed by the address of the stand-in's storage."""


@contextmanager
def stand_ins(engine: ZeRO3) -> Iterator[Shards]:
    """Replace the modules' parameters by stand-ins inside the context; see Note [Stand-ins]."""
    shards: Shards = {}
    shown: dict[nn.Parameter, nn.Parameter] = {}
    own_units = ordered_units(engine)
    for unit in own_units:
        for handle in unit.handles:
            for parameter in handle.sharded_params:
                info = get_info(parameter)
                assert info is not None, "sharded parameters have ParameterInfo"
                shard = Shard(parameter, info, handle.placement.replica)
                stand_in = nn.Parameter(shard.meta(parameter.dtype), parameter.requires_grad)
                copy_attributes(parameter, stand_in)
                shards[_storage(stand_in)] = shard
                shown[parameter] = stand_in
    try:
        for unit in own_units:
            unit.views.show(shown)
            unit.views.shows_stand_ins = True
        yield shards
    finally:
        for unit in own_units:
            unit.views.show({})
            unit.views.shows_stand_ins = False
            if unit.shows_unsharded:
                unit.views.swap(to_full=True)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def sharded_of(shown: nn.Parameter, shards: Shards) -> nn.Parameter:
    """The parameter that a stand-in stands for; any other parameter itself."""
    shard = shards.get(_storage(shown))
    return shown if shard is None else shard.parameter


def _entry_of(entry: Any, shards: Shards) -> Any:
    """Convert an entry of the module's sharded state dict to one for this rank's shard."""
    if not isinstance(entry, (ShardedTensor, ShardedTensorFactory)):
        return entry
    shard = shards.get(_storage(entry.data))
    if shard is None:
        if entry.data.is_meta:
            raise NotImplementedError(
                f"sharded_state_dict: {entry.key}: its module saves a new tensor computed from "
                "parameters, which this rank has no shard of; use layerzero.checkpoint.save"
            )
        return entry  # A buffer, or a parameter that is not sharded.
    if shard.info.tensor_parallel is not None:
        raise NotImplementedError(
            f"sharded_state_dict: {shard.info.fqn} is a DTensor, which Megatron's format cannot "
            "express; use Megatron's tensor-parallel layers, or layerzero.checkpoint.save"
        )
    build = _whole_of(entry, shard)
    # Checked on every rank, even without elements: if one raised later, while it saves, the others
    # would hang.
    _parts(build, shard, entry.key, shard.parameter.dtype, entry.replica_id)
    if not shard.parameter.numel():
        return EmptyShard(entry.key, shard.parameter)
    # The last number distinguishes data-parallel ranks. Here they have different shards, so the
    # index of the copy replaces it.
    others = entry.replica_id[:-1] if isinstance(entry.replica_id, tuple) else ()
    return ShardedTensorFactory(
        entry.key,
        shard.parameter,
        functools.partial(_build, build, shard),
        _join,
        (*others, shard.replica),
    )


_Whole = Callable[[str, torch.Tensor, Any], list[ShardedTensor]]
"""Called with a key, a meta tensor of the local shape and a replica id; returns the ShardedTensors
that a rank of an unsharded model saves."""


def _whole_of(entry: Any, shard: Shard) -> _Whole:
    if isinstance(entry, ShardedTensorFactory):
        build = entry.build_fn

        def build_all(key: str, whole: torch.Tensor, replica_id: Any) -> list[ShardedTensor]:
            built = build(key, whole, replica_id, None)
            return list(nested_values(built if isinstance(built, (dict, list)) else [built]))

        return build_all
    if entry.data.shape != shard.info.shape:
        raise _refusal(entry.key, shard, "saves a part of")
    template = entry.without_data()

    def build_one(key: str, whole: torch.Tensor, replica_id: Any) -> list[ShardedTensor]:
        return [replace(template, key=key, data=whole, dtype=whole.dtype, replica_id=replica_id)]

    return build_one


def _parts(
    build_whole: _Whole, shard: Shard, key: str, dtype: torch.dtype, replica_id: Any
) -> list[tuple[int, ShardedTensor]]:
    """What an unsharded rank saves of the parameter: (start in the flattened parameter, tensor).

    Raises:
        NotImplementedError: these are not contiguous parts that together cover the parameter once.
    """
    whole = shard.meta(dtype)
    parts: list[tuple[int, ShardedTensor]] = []
    for tensor in build_whole(key, whole, replica_id):
        if _storage(tensor.data) != _storage(whole) or not tensor.data.is_contiguous():
            raise _refusal(key, shard, "rearranges")
        parts.append((tensor.data.storage_offset(), tensor))
    parts.sort(key=lambda part: part[0])
    end = 0
    for first, tensor in parts:
        if first != end:
            raise _refusal(key, shard, "does not save each element once of")
        end += tensor.data.numel()
    if end != whole.numel():
        raise _refusal(key, shard, "does not save all of")
    return parts


def _refusal(key: str, shard: Shard, does: str) -> NotImplementedError:
    return NotImplementedError(
        f"sharded_state_dict: {key}: its module {does} {shard.info.fqn}, so this rank cannot "
        "locate its shard; use layerzero.checkpoint.save"
    )


def _build(
    build_whole: _Whole,
    shard: Shard,
    key: str,
    data: torch.Tensor,
    replica_id: Any,
    flattened_range: slice | None,
) -> list[ShardedTensor]:
    """Split `data`, of the shard's shape, into boxes; see Note [Boxes of named tensors]."""
    start, stop = shard.info.range
    found: list[ShardedTensor] = []
    for first, tensor in _parts(build_whole, shard, key, data.dtype, replica_id):
        begin, end = max(start, first), min(stop, first + tensor.data.numel())
        # Prepended axes, such as the layers of a model, count as dimensions of size 1.
        sizes = (1,) * tensor.prepend_axis_num + tuple(tensor.data.shape)
        extent = Extent(tuple(tensor.global_shape), sizes, tuple(tensor.global_offset))
        for box in boxes(extent, begin - first, end - first):
            at = begin - start + box.local
            numel = torch.Size(box.sizes).numel()
            own = replace(
                tensor,
                data=data.detach()[at : at + numel].view(box.sizes),
                local_shape=box.sizes,
                global_offset=box.offsets,
                axis_fragmentations=None,
                prepend_axis_num=0,
            )
            found.append(own)
    return found


def _join(found: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join boxes to a shard; without a copy if they were read into the shard's own memory."""
    first = found[0]
    place = first.storage_offset()
    for each in found:
        in_place = _storage(each) == _storage(first) and each.storage_offset() == place
        if not (in_place and each.is_contiguous()):
            return torch.cat([box.reshape(-1) for box in found])
        place += each.numel()
    numel = place - first.storage_offset()
    return first.as_strided((numel,), (1,), first.storage_offset())
