"""Maps a rank's shard of a parameter to runs and boxes of the whole tensor. Integers only.

A shard is a range of the flattened *local* tensor: the parameter itself, or this rank's
tensor-parallel block of it. It is cut in two ways:

    runs    contiguous in the shard and in the flattened whole tensor; our files use them
    boxes   contiguous in the shard and a box of the whole tensor; torch's distributed checkpoints
            use them

    whole tensor [4, 5], not split, shard = elements 3 to 17:    one run, three boxes

        . . . a a      a: rows 0 to 1, columns 3 to 5
        b b b b b      b: rows 1 to 3, all columns
        b b b b b
        c c . . .      c: row 3, columns 0 to 2
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Run(NamedTuple):
    """Elements [start, start + numel) of the flattened whole tensor, at `local` in the shard."""

    local: int
    start: int
    numel: int


class Box(NamedTuple):
    """The box of `sizes` at `offsets` in the whole tensor, contiguous from `local` in the shard."""

    local: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Extent(NamedTuple):
    """A block of a whole tensor: all of it, or this rank's tensor-parallel part."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    local_shape: tuple[int, ...]
    """Shape of the block."""
    offsets: tuple[int, ...]
    """Offset of the block in the whole tensor, for each dimension."""

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Extent:
        return cls(tuple(shape), tuple(shape), (0,) * len(shape))


def runs(extent: Extent, start: int, stop: int) -> Iterator[Run]:
    """Cut elements [start, stop) of the flattened block into runs, in ascending order."""
    if stop <= start:
        return
    shape, local_shape, offsets = extent
    # After dimension `split` the block is as wide as the whole, so its rows are contiguous.
    narrow = [dim for dim, size in enumerate(shape) if local_shape[dim] != size]
    if not narrow:
        yield Run(0, start, stop - start)
        return
    split = narrow[-1]
    row = math.prod(local_shape[split:])
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    first = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    for index in range(start // row, -(-stop // row)):
        base, rest = first, index
        for dim in reversed(range(split)):
            rest, coordinate = divmod(rest, local_shape[dim])
            base += coordinate * strides[dim]
        begin, end = max(start, index * row), min(stop, (index + 1) * row)
        yield Run(begin - start, base + begin - index * row, end - begin)


def boxes(extent: Extent, start: int, stop: int) -> Iterator[Box]:
    """Cut elements [start, stop) of the flattened block into boxes, in ascending order."""
    shape, at = extent.local_shape, start
    rows = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    while at < stop:
        places = [at // row % size for row, size in zip(rows, shape, strict=True)]
        sizes = [1] * len(shape)
        # As many rows as fit, of the outermost dimension of which a whole row begins here.
        for dim, row in enumerate(rows):
            if at % row == 0 and at + row <= stop:
                sizes[dim:] = min(shape[dim] - places[dim], (stop - at) // row), *shape[dim + 1 :]
                break
        offsets = tuple(a + b for a, b in zip(places, extent.offsets, strict=True))
        yield Box(at - start, offsets, tuple(sizes))
        at += math.prod(sizes)
