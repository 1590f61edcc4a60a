"""Pieces: which parts of which tensors this rank sends, and where they are in its flat shards.

    main shard   | a a a a - b b b b b b |      a, b: pieces of two parameters      - gap
    chunk 0      | a a a a - b b b b b b |      indices found in it belong to the pieces

One rank sends each element: that of the first of its copies (`outer="replicate"`, tensor-parallel
ranks with the same part), and the model's first rank if it is whole on every rank (buffers,
ignored parameters).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from layerzero.checkpoint.format.inventory import replica_of
from layerzero.flat.parameter_info import info_of
from layerzero.notices import is_first_rank
from layerzero.state_dict.names import Names, extent_of, named_buffers
from layerzero.state_dict.ranges import Extent
from layerzero.step.handle import FlatParamHandle
from layerzero.step.root import RootState
from layerzero.verify.signature import whole_index


@dataclass(frozen=True)
class Piece:
    """Elements [start, start + numel) of the flattened block `extent`, at `offset` in a chunk."""

    names: tuple[str, ...]
    """As in `named_parameters`; the first one, and then the others of a tied parameter."""
    extent: Extent
    start: int
    numel: int
    offset: int

    def in_whole(self, places: torch.Tensor) -> torch.Tensor:
        """Positions in the flattened whole tensor of elements at `places` in the chunk."""
        rest = places + (self.start - self.offset)
        is_whole = self.extent.local_shape == self.extent.shape
        return rest if is_whole else whole_index(rest, *self.extent)


@dataclass(frozen=True)
class Source:
    """A flat tensor of this rank from which pieces are sent."""

    read: Callable[[], torch.Tensor]
    """Returns it as it is now: [numel], contiguous, detached."""
    pieces: tuple[Piece, ...]
    """In order of offset; gaps between them are not sent."""


def sources_of(model: nn.Module, root: RootState, names: Names, buffers: bool) -> Iterator[Source]:
    """All that this rank sends. Not collective."""
    for handle in names.handles:
        yield from _of_handle(handle, names)
    axes = [*root.groups, *root.tensor_parallel_groups]
    if not (all(axis.is_first for axis in axes) if axes else is_first_rank()):
        return
    for parameter, found in names.unsharded():
        yield from _of_whole(parameter.detach(), found)
    for buffer, found in named_buffers(model) if buffers else ():
        yield from _of_whole(buffer, found)


def _of_handle(handle: FlatParamHandle, names: Names) -> Iterator[Source]:
    """The runs of neighbouring pieces that this rank sends, as a source each."""
    ranges = handle.layout.shard_ranges(handle.placement.main_shard_index)
    shards = zip(ranges, map(info_of, handle.sharded_params), handle.sharded_params, strict=True)
    present = (shard for shard in shards if shard[0].numel)
    for replica, group in itertools.groupby(present, lambda s: replica_of(handle, s[1], names)):
        if replica:
            continue
        run = list(group)
        begin = run[0][0].offset
        pieces = [
            Piece(names.of(p) or (), extent_of(info), own.start, own.numel, own.offset - begin)
            for own, info, p in run
        ]
        end = begin + pieces[-1].offset + pieces[-1].numel
        yield Source(functools.partial(_read, handle, begin, end), tuple(pieces))


def _read(handle: FlatParamHandle, begin: int, end: int) -> torch.Tensor:
    handle.reset_sharded_params(handle.fqns[0])
    return handle.main_shard.detach()[begin:end]


def _of_whole(tensor: torch.Tensor, names: tuple[str, ...]) -> Iterator[Source]:
    if tensor.numel():
        piece = Piece(names, Extent.whole(tensor.shape), 0, tensor.numel(), 0)
        yield Source(lambda: tensor.detach().reshape(-1), (piece,))
