"""Whole tensors for the shards in a state dict, here and in torch's `full_state_dict=True`.

torch's `get_state_dict` takes what `state_dict()` gave, and gathers the tensors that it knows how
to gather: DTensors and ShardedTensors. Any other tensor passes as it is. `teach_torch` puts a step
before that, which gathers ours (docs/internals/decisions/0019-torch-gathers-our-shards.md).
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from layerzero.core.flat_param import FlatParamHandle
from layerzero.runtime.root import RootState
from layerzero.state_dict.dtype_names import dtype_name
from layerzero.state_dict.errors import CheckpointError
from layerzero.state_dict.module_state import unit_of
from layerzero.state_dict.parameter_shard import ParameterShard
from layerzero.state_dict.participants import participants_of
from layerzero.state_dict.preconditions import refuse_experts
from layerzero.state_dict.rank_local import RankLocal
from layerzero.state_dict.stream import FlatSource, stream_sources

_BUCKET_NBYTES = 1 << 30
_TAUGHT = "_gathers_layerzero_shards"

_Shards = dict[int, ParameterShard]
"""By a parameter's place in its handle."""


def gather_shards(
    state_dict: dict[str, Any], *, cpu_offload: bool = False, ranks_only: Sequence[int] = ()
) -> dict[str, Any]:
    """The same nesting of dicts and lists with full tensors in place of shards.

    Collective over the ranks that share the model, where any shard is in it.

    Args:
        cpu_offload: full tensors go to the CPU, one by one.
        ranks_only: None takes their place on all other ranks; (): all ranks get them.

    Raises:
        ValueError: a shard came out of a file, or its model is gone.
        CheckpointError: ranks have different shards, on all of them.
        NotImplementedError: optimizer state of one rank's own is among the values.
        CollectiveError: a rank died, or did not come.
    """
    by_root: dict[int, tuple[RootState, list[ParameterShard]]] = {}
    for value in _leaves(state_dict):
        if isinstance(value, ParameterShard):
            root = _root_of(value)
            by_root.setdefault(id(root), (root, []))[1].append(value)
        elif isinstance(value, RankLocal):
            value.refuse()
    if not by_root:
        return state_dict
    keeps = not ranks_only or dist.get_rank() in ranks_only
    full: dict[int, torch.Tensor | None] = {}
    for root, shards in by_root.values():
        if ranks_only:
            refuse_experts(root, "full tensors on some ranks alone")
        for shard, value in _gather(root, shards):
            kept = value.detach().to("cpu" if cpu_offload else value.device, copy=True)
            full[id(shard)] = kept if keeps else None
            del value
    replaced: dict[str, Any] = _replace(state_dict, full)
    return replaced


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _replace(value: Any, full: dict[int, torch.Tensor | None]) -> Any:
    if isinstance(value, dict):
        return {key: _replace(item, full) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_replace(item, full) for item in value)
    return full[id(value)] if isinstance(value, ParameterShard) else value


def _root_of(shard: ParameterShard) -> RootState:
    piece = None if shard.piece is None else shard.piece()
    unit = None if piece is None else unit_of(piece)
    if unit is None:
        raise ValueError(
            f"{shard}: its model is not known here: it came out of a file, or the model is gone. "
            "Load it into a model first"
        )
    return unit.root


def _gather(
    root: RootState, shards: Sequence[ParameterShard]
) -> Iterator[tuple[ParameterShard, torch.Tensor]]:
    """Every shard with the whole tensor. Collective over the ranks that share the model."""
    handles = [handle for unit in root.units for handle in unit.handles]
    places = {
        id(piece): (number, index)
        for number, handle in enumerate(handles)
        for index, piece in enumerate(handle.sharded_params)
    }
    # A piece may come several times: weights, state, tied weights. Each time makes a layer.
    layers: list[dict[torch.dtype, list[_Shards]]] = [{} for _ in handles]
    for shard in shards:
        assert shard.piece is not None
        number, index = places[id(shard.piece())]
        own = layers[number].setdefault(shard.local.dtype, [])
        layer = next((each for each in own if index not in each), None)
        if layer is None:
            own.append(layer := {})
        layer[index] = shard
    _agree(root, handles, layers)
    sources: list[FlatSource] = []
    layer_of: dict[int, _Shards] = {}
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
    layers: Sequence[dict[torch.dtype, list[_Shards]]],
) -> None:
    """Refuse, on all ranks, what ranks would not gather alike."""

    def tell() -> bytes:
        own = {
            handle.fqns[0]: sorted(
                [dtype_name(dtype, handle.fqns[0]), sorted(layer)]
                for dtype, found in by_dtype.items()
                for layer in found
            )
            for handle, by_dtype in zip(handles, layers, strict=True)
        }
        return json.dumps(own).encode()

    together = participants_of(root, None)
    told = [json.loads(answer) for answer in together.exchange("state dict", tell)]
    first: dict[str, tuple[int, Any]] = {}
    for rank, own in enumerate(told):
        for name, found in own.items():
            other, expected = first.setdefault(name, (rank, found))
            if found != expected:
                raise CheckpointError(
                    f"state dict: ranks have different entries for {name!r} and what is sharded "
                    f"with it: {_count(expected)} on rank {other}, {_count(found)} on rank {rank}; "
                    "take the state dict of the same models and optimizers on all of them"
                )


def _count(found: Sequence[tuple[str, Sequence[int]]]) -> int:
    return sum(len(indices) for _, indices in found)


def _source(handle: FlatParamHandle, dtype: torch.dtype, layer: _Shards) -> FlatSource:
    def shard() -> torch.Tensor:
        flat = torch.zeros_like(handle.main_shard, dtype=dtype)
        pieces: Sequence[Any] = handle.layout.pieces(handle.placement.main_shard_index)
        for index, value in layer.items():
            piece = pieces[index]
            flat[piece.offset : piece.offset + piece.numel] = value.local
        return flat

    return FlatSource(handle, handle.fqns[0], dtype, shard, sorted(layer))


def teach_torch() -> None:
    """Have torch's `get_state_dict` and its like gather shards where they gather DTensors."""
    from torch.distributed import _state_dict_utils  # loads more than `import layerzero` should

    original = _state_dict_utils._gather_state_dict
    if not hasattr(original, _TAUGHT):
        _state_dict_utils._gather_state_dict = _taught(original)
    user = sys.modules.get("torch.distributed.checkpoint.state_dict")
    if user is not None:  # else it will find the one above
        user._gather_state_dict = _state_dict_utils._gather_state_dict  # type: ignore[attr-defined]


def _taught(original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    @functools.wraps(original)
    def gather_state_dict(state_dict: dict[str, Any], **options: Any) -> dict[str, Any]:
        ours = gather_shards(
            state_dict,
            cpu_offload=options.get("cpu_offload", False),
            ranks_only=options.get("ranks_only", ()),
        )
        return original(ours, **options)

    setattr(gather_state_dict, _TAUGHT, True)
    return gather_state_dict
