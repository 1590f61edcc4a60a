"""Which rank holds which elements of a whole tensor, over all axes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from layerzero.flat.layout import FlatLayout, row_numels
from layerzero.flat.parameter_info import get_info
from layerzero.optim.whole_tensor.party import Party
from layerzero.optim.whole_tensor.plan import Piece, pieces_of
from layerzero.step.handle import FlatParamHandle
from layerzero.step.root import RootState


class Block(NamedTuple):
    """A block of a whole tensor, one number per dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class TensorMap(NamedTuple):
    """The blocks of a whole tensor, and the pieces of each replica."""

    blocks: tuple[Block, ...]
    replicas: tuple[tuple[Piece, ...], ...]
    replica_of_rank: dict[int, int]


def maps_of(
    root: RootState, party: Party, places: Sequence[tuple[nn.Parameter, FlatParamHandle, int]]
) -> list[TensorMap]:
    """The map of each parameter, in order. Collective over the party's axes, if it has any."""
    handles = list(dict.fromkeys(handle for _, handle, _ in places))
    geometry = _geometry(root, party, handles)
    layouts = [_layouts(handle, blocks) for handle, blocks in zip(handles, geometry, strict=True)]
    maps = []
    for parameter, handle, index in places:
        number = handles.index(handle)
        blocks = [each[index] for each in geometry[number]]
        maps.append(_map_of(party, parameter, index, blocks, layouts[number]))
    return maps


def _geometry(
    root: RootState, party: Party, handles: Sequence[FlatParamHandle]
) -> list[list[list[Block]]]:
    """The blocks as [handle][tensor-parallel place][parameter]."""
    own = [
        [
            Block((0,) * len(shape) if split is None else split.offset, tuple(shape))
            for shape, split in zip(handle.shapes, handle.splits, strict=True)
        ]
        for handle in handles
    ]
    if not party.axes:
        return [[blocks] for blocks in own]
    flat = [block for blocks in own for block in blocks]
    width = max((len(block.sizes) for block in flat), default=0)
    rows = [
        [*block.offsets, *[0] * (width - len(block.sizes)), *block.sizes, *[0] * width][: 2 * width]
        for block in flat
    ]
    table = torch.tensor(rows, dtype=torch.int64, device=root.device).view(len(rows), 2 * width)
    places = party.gather_along_axes(root, table).tolist()
    found: list[list[list[Block]]] = [[] for _ in handles]
    for place in places:
        remaining = iter(place)
        for number, blocks in enumerate(own):
            of_place = []
            for block in blocks:
                row, ndim = next(remaining), len(block.sizes)
                of_place.append(Block(tuple(row[:ndim]), tuple(row[width : width + ndim])))
            found[number].append(of_place)
    return found


def _layouts(handle: FlatParamHandle, places: Sequence[Sequence[Block]]) -> list[FlatLayout]:
    """The layout of a flat parameter at each tensor-parallel place."""
    own = handle.layout
    if len(places) == 1:
        return [own]
    return [
        FlatLayout.build(
            [torch.Size(block.sizes).numel() for block in blocks],
            own.group_size,
            own.alignment,
            own.slices,
            row_numels([block.sizes for block in blocks], handle.row_multiple),
        )
        for blocks in places
    ]


def _map_of(
    party: Party,
    parameter: nn.Parameter,
    index: int,
    geometry: Sequence[Block],
    layouts: Sequence[FlatLayout],
) -> TensorMap:
    info = get_info(parameter)
    assert info is not None, "it is sharded"
    split = info.tensor_parallel
    sizes = [axis.size for axis in party.axes]
    # Without a split each place holds a copy.
    is_split = [
        split is not None and not split.placements[axis].is_replicate()
        for axis, size in enumerate(split.mesh.shape if split is not None else sizes)
        if split is None or size > 1
    ]
    places = _places(sizes, is_split)
    replicas: list[tuple[Piece, ...]] = []
    replica_of_rank: dict[int, int] = {}
    num_copies = len(party.holders[0][0])
    for row in places:
        for copy in range(num_copies):
            for place in row:
                for shard in party.holders[place]:
                    replica_of_rank[shard[copy]] = len(replicas)
            replicas.append(
                tuple(
                    piece
                    for number, place in enumerate(row)
                    for piece in pieces_of(
                        layouts[place],
                        index,
                        [shard[copy] for shard in party.holders[place]],
                        number,
                    )
                )
            )
    return TensorMap(
        tuple(geometry[place] for place in places[0]), tuple(replicas), replica_of_rank
    )


def _places(sizes: Sequence[int], is_split: Sequence[bool]) -> list[list[int]]:
    """Tensor-parallel places: a row for each copy, with the blocks in the same order."""
    strides = list(itertools.accumulate(sizes, lambda a, b: a * b, initial=1))[:-1]

    def sums(chosen: bool) -> list[int]:
        steps = [
            range(0, size * stride, stride)
            for size, stride, split in zip(sizes, strides, is_split, strict=True)
            if split is chosen
        ]
        return [sum(each) for each in itertools.product(*steps)]

    return [[copy + block for block in sums(True)] for copy in sums(False)]
