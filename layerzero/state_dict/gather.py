"""Gathers full tensors for the shards in state dicts."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from layerzero.state_dict.checkpoint_group import checkpoint_group_of
from layerzero.state_dict.dtype_names import dtype_name
from layerzero.state_dict.errors import CheckpointError
from layerzero.state_dict.owners import unit_of
from layerzero.state_dict.stream import FlatSource, stream_sources
from layerzero.step.handle import FlatParamHandle
from layerzero.step.root import RootState
from layerzero.step.root import root_of as root_of_unit

_BUCKET_NBYTES = 1 << 30


class Shard(Protocol):
    """This rank's part of a parameter, or of a tensor shaped like one."""

    local: torch.Tensor
    sharded_param: weakref.ref[nn.Parameter] | None
    """Its sharded parameter; None if the shard was read from a file."""


_Shard = TypeVar("_Shard", bound=Shard)
_Layer = dict[int, _Shard]
"""At most one shard for each parameter of a handle, keyed by the parameter's index."""


def root_of(shard: Shard) -> RootState:
    sharded_param = None if shard.sharded_param is None else shard.sharded_param()
    unit = None if sharded_param is None else unit_of(sharded_param)
    if unit is None:
        raise ValueError(
            f"{shard} belongs to no model in this process: it was read from a file, or its model "
            "was deleted. Load it into a model first"
        )
    return root_of_unit(unit)


def gather(
    root: RootState, shards: Sequence[_Shard], are_alike: bool = False
) -> Iterator[tuple[_Shard, torch.Tensor]]:
    """Yield every shard with its full tensor. Collective over the ranks that share the model.

    `are_alike`: all ranks are known to have shards of the same parameters.
    """
    handles = [handle for unit in root.units for handle in unit.handles]
    places = {
        id(sharded_param): (number, index)
        for number, handle in enumerate(handles)
        for index, sharded_param in enumerate(handle.sharded_params)
    }
    # A parameter may have several shards (weights, optimizer state, tied weights). A layer takes
    # one shard for each parameter, so that it can be gathered like the flat parameter.
    layers: list[dict[torch.dtype, list[_Layer[_Shard]]]] = [{} for _ in handles]
    for shard in shards:
        assert shard.sharded_param is not None
        number, index = places[id(shard.sharded_param())]
        own = layers[number].setdefault(shard.local.dtype, [])
        layer = next((each for each in own if index not in each), None)
        if layer is None:
            own.append(layer := {})
        layer[index] = shard
    if not are_alike:
        _agree(root, handles, layers)
    sources: list[FlatSource] = []
    layer_of: dict[int, _Layer[_Shard]] = {}
    for handle, by_dtype in zip(handles, layers, strict=True):
        for dtype, own in sorted(by_dtype.items(), key=lambda item: str(item[0])):
            for layer in own:
                sources.append(_source(handle, dtype, layer))
                layer_of[id(sources[-1])] = layer
    for source, index, value in stream_sources(sources, _BUCKET_NBYTES):
        yield layer_of[id(source)][index], value


def _agree(
    root: RootState,
    handles: Sequence[FlatParamHandle],
    layers: Sequence[dict[torch.dtype, list[dict[int, Any]]]],
) -> None:
    """Raise CheckpointError on all ranks if ranks would gather different tensors. Collective."""

    def describe() -> bytes:
        own = {
            handle.fqns[0]: sorted(
                [dtype_name(dtype, handle.fqns[0]), sorted(layer)]
                for dtype, found in by_dtype.items()
                for layer in found
            )
            for handle, by_dtype in zip(handles, layers, strict=True)
        }
        return json.dumps(own).encode()

    together = checkpoint_group_of(root, None)
    described = [json.loads(answer) for answer in together.exchange("state dict", describe)]
    first: dict[str, tuple[int, Any]] = {}
    for rank, own in enumerate(described):
        for name, found in own.items():
            other, expected = first.setdefault(name, (rank, found))
            if found != expected:
                raise CheckpointError(
                    f"state dict: the number of entries for {name!r} and the parameters sharded "
                    f"with it differs between ranks: {_count(expected)} on rank {other}, "
                    f"{_count(found)} on rank {rank}; pass the state dict of the same models and "
                    "optimizers on every rank"
                )


def _count(found: Sequence[tuple[str, Sequence[int]]]) -> int:
    return sum(len(indices) for _, indices in found)


def _source(handle: FlatParamHandle, dtype: torch.dtype, layer: dict[int, Any]) -> FlatSource:
    def shard() -> torch.Tensor:
        flat = torch.zeros_like(handle.main_shard, dtype=dtype)
        ranges = handle.layout.shard_ranges(handle.placement.main_shard_index)
        for index, value in layer.items():
            owned = ranges[index]
            flat[owned.offset : owned.offset + owned.numel] = value.local.reshape(-1)
        return flat

    return FlatSource(handle, handle.fqns[0], dtype, shard, sorted(layer))
