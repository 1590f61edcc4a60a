"""Expresses sharded parameters as boxes of Megatron's named tensors (`ShardedTensor`).

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from torch import nn

from layerzero import ZeRO3
from layerzero.checkpoint.adapters import Box, Extent, boxes
from layerzero.integrations.engine import copy_attributes, get_info, ordered_units


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
            unit.views.show_sharded()
            unit.views.shows_stand_ins = False
            if unit.shows_unsharded:
                unit.views.swap(to_full=True)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def sharded_of(shown: nn.Parameter, shards: Shards) -> nn.Parameter:
    """The parameter that a stand-in stands for; any other parameter itself."""
    shard = shards.get(_storage(shown))
    return shown if shard is None else shard.parameter


def shard_entry(entry: Any, shards: Shards) -> Any:
    """Convert an entry of the module's sharded state dict to one for this rank's shard.

    Raises:
        NotImplementedError: the module saves something that this rank cannot find its shard in.
    """
    if not isinstance(entry, (ShardedTensor, ShardedTensorFactory)):
        return entry
    shard = shards.get(_storage(entry.data))
    if shard is None:
        if entry.data.is_meta:
            raise NotImplementedError(
                f"sharded_state_dict: {entry.key}: its module saves a new tensor computed from "
                "parameters, in which this rank cannot locate its shards; use "
                "layerzero.checkpoint.save"
            )
        return entry  # A buffer, or a parameter that is not sharded.
    if shard.info.tensor_parallel is not None:
        raise NotImplementedError(
            f"sharded_state_dict: {shard.info.fqn} is a DTensor, whose offset Megatron's format "
            "cannot express; use Megatron's own tensor-parallel layers, or "
            "layerzero.checkpoint.save"
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
            found.append(_of_box(tensor, box, data.detach()[at : at + numel]))
    return found


def _of_box(tensor: ShardedTensor, box: Box, data: torch.Tensor) -> ShardedTensor:
    return replace(
        tensor,
        data=data.view(box.sizes),
        local_shape=box.sizes,
        global_offset=box.offsets,
        axis_fragmentations=None,
        prepend_axis_num=0,
    )


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
