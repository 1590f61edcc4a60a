"""A sharded model's pieces in Megatron's terms: which boxes of which named tensors they are.

Note [Boxes of named tensors]
    A rank's piece is a range of the flattened parameter, which Megatron cannot name any more (a
    `flattened_range` is refused). What it can name is a block at any offset, so the piece is cut
    into boxes (state_dict/ranges.py), at most 2 n - 1 for n dimensions. A `ShardedTensorFactory`
    does the cutting, and joins what was loaded to the piece again. Like Megatron's own factories it
    serves optimizer state of the same shape, too.

Note [Stand-ins]
    While the modules are asked for their sharded state dict they show stand-ins on the meta device,
    of the original shapes. No parameter is gathered, and a tensor in the answer is known by the
    storage it is a view of.
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
from layerzero.core.parameter_info import ParameterInfo, copy_attributes, get_info
from layerzero.runtime.flat_param_handle import FlatParamHandle
from layerzero.runtime.root import ordered_units


@dataclass(frozen=True)
class Piece:
    """A stand-in, and what this rank has of the parameter it stands for."""

    parameter: nn.Parameter
    info: ParameterInfo
    shape: torch.Size
    replica: int

    def meta(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(self.shape, dtype=dtype, device="meta")


class NoPiece(LocalNonpersistentObject):
    """In place of a parameter of which this rank has nothing: not saved, and loaded as it is.

    Attributes:
        key: what it is called where a rank has something of it.
        data: the empty piece, as in entries of others.
    """

    def __init__(self, key: str, data: nn.Parameter) -> None:
        super().__init__(data.detach())
        self.key = key
        self.data = data


Pieces = dict[int, Piece]
"""By the address of the stand-in's storage."""


@contextmanager
def stand_ins(engine: ZeRO3) -> Iterator[Pieces]:
    """Let the modules show meta tensors of the original shapes; see Note [Stand-ins]."""
    pieces: Pieces = {}
    shown: dict[nn.Parameter, nn.Parameter] = {}
    own_units = ordered_units(engine)
    for unit in own_units:
        for handle in unit.handles:
            for piece in _pieces_of(handle):
                stand_in = nn.Parameter(
                    piece.meta(piece.parameter.dtype), piece.parameter.requires_grad
                )
                copy_attributes(piece.parameter, stand_in)
                pieces[_storage(stand_in)] = piece
                shown[piece.parameter] = stand_in
    try:
        for unit in own_units:
            unit.views.show(shown)
            unit.views.shows_stand_ins = True
        yield pieces
    finally:
        for unit in own_units:
            unit.views.show_sharded()
            unit.views.shows_stand_ins = False
            if unit.shows_unsharded:
                unit.views.show_unsharded(unit.label)


def _pieces_of(handle: FlatParamHandle) -> Iterator[Piece]:
    for parameter, shape in zip(handle.sharded_params, handle.shapes, strict=True):
        info = get_info(parameter)
        assert info is not None, "every piece has its mark"
        if info.tensor_parallel is not None:
            raise NotImplementedError(
                f"sharded_state_dict: {info.fqn} is a DTensor, whose place Megatron cannot tell; "
                "use Megatron's own tensor-parallel layers, or layerzero.checkpoint.save"
            )
        yield Piece(parameter, info, shape, handle.placement.replica)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def entry_of_piece(entry: Any, pieces: Pieces) -> Any:
    """An entry of the module's sharded state dict, with this rank's piece as its data."""
    if not isinstance(entry, (ShardedTensor, ShardedTensorFactory)):
        return entry
    piece = pieces.get(_storage(entry.data))
    if piece is None:
        if entry.data.is_meta:
            raise NotImplementedError(
                f"sharded_state_dict: {entry.key}: its module makes a new tensor of parameters, "
                "of which a rank with pieces does not know its part; use layerzero.checkpoint.save"
            )
        return entry  # a buffer, or a parameter that is not sharded
    build = _whole_of(entry, piece)
    # On every rank, with a piece or not: one that failed alone, when it saves, would hang the rest.
    _parts(build, piece, entry.key, piece.parameter.dtype, entry.replica_id)
    if not piece.parameter.numel():
        return NoPiece(entry.key, piece.parameter)
    # The last number tells data-parallel ranks apart, which here have different pieces.
    others = entry.replica_id[:-1] if isinstance(entry.replica_id, tuple) else ()
    return ShardedTensorFactory(
        entry.key,
        piece.parameter,
        functools.partial(_build, build, piece),
        _join,
        (*others, piece.replica),
    )


_Whole = Callable[[str, torch.Tensor, Any], list[ShardedTensor]]
"""From a key, a meta tensor of the local shape and a replica id: what an unsharded rank saves."""


def _whole_of(entry: Any, piece: Piece) -> _Whole:
    if isinstance(entry, ShardedTensorFactory):
        build = entry.build_fn

        def build_all(key: str, whole: torch.Tensor, replica_id: Any) -> list[ShardedTensor]:
            built = build(key, whole, replica_id, None)
            return list(nested_values(built if isinstance(built, (dict, list)) else [built]))

        return build_all
    if entry.data.shape != piece.shape:
        raise _refusal(entry.key, piece, "saves a part of")
    template = entry.without_data()

    def build_one(key: str, whole: torch.Tensor, replica_id: Any) -> list[ShardedTensor]:
        return [replace(template, key=key, data=whole, dtype=whole.dtype, replica_id=replica_id)]

    return build_one


def _parts(
    build_whole: _Whole, piece: Piece, key: str, dtype: torch.dtype, replica_id: Any
) -> list[tuple[int, ShardedTensor]]:
    """What an unsharded rank saves of the parameter, and where in it flattened that begins."""
    whole = piece.meta(dtype)
    parts: list[tuple[int, ShardedTensor]] = []
    for tensor in build_whole(key, whole, replica_id):
        if _storage(tensor.data) != _storage(whole) or not tensor.data.is_contiguous():
            raise _refusal(key, piece, "rearranges")
        parts.append((tensor.data.storage_offset(), tensor))
    parts.sort(key=lambda part: part[0])
    end = 0
    for first, tensor in parts:
        if first != end:
            raise _refusal(key, piece, "does not save each element once of")
        end += tensor.data.numel()
    if end != whole.numel():
        raise _refusal(key, piece, "does not save all of")
    return parts


def _refusal(key: str, piece: Piece, does: str) -> NotImplementedError:
    return NotImplementedError(
        f"sharded_state_dict: {key}: its module {does} {piece.info.fqn}, and a rank with a piece "
        "does not know its part; use layerzero.checkpoint.save"
    )


def _build(
    build_whole: _Whole,
    piece: Piece,
    key: str,
    data: torch.Tensor,
    replica_id: Any,
    flattened_range: slice | None,
) -> list[ShardedTensor]:
    """Cut `data`, of the piece's shape, into boxes; see Note [Boxes of named tensors]."""
    start, stop = piece.info.range
    found: list[ShardedTensor] = []
    for first, tensor in _parts(build_whole, piece, key, data.dtype, replica_id):
        begin, end = max(start, first), min(stop, first + tensor.data.numel())
        # One dimension for each of the global tensor's, as for the layers of a model.
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


def _join(boxes_of_piece: Sequence[torch.Tensor]) -> torch.Tensor:
    """The piece again: without a copy where its own memory was read into."""
    first = boxes_of_piece[0]
    place = first.storage_offset()
    for each in boxes_of_piece:
        in_place = _storage(each) == _storage(first) and each.storage_offset() == place
        if not (in_place and each.is_contiguous()):
            return torch.cat([box.reshape(-1) for box in boxes_of_piece])
        place += each.numel()
    numel = place - first.storage_offset()
    return first.as_strided((numel,), (1,), first.storage_offset())
