"""FlatLayout and GradientLayout: offsets of parameters and gradients in buffers; integers only.

    numels (5, 20, 3), alignment 4, two ranks: shard_numel 16, one row per rank

        rank 0 | a a a a a - - - b b b b b b b b |   a: parameter 0, starts at 0
        rank 1 | b b b b b b b b b b b b c c c . |   b: parameter 1, starts at 8 (aligned)
                                                     c: parameter 2, starts at 28
        - gap before an aligned start    . padding that completes the last shard

Offsets and ranges count elements. A parameter's range on a rank is (start, stop) in the
flattened original; (0, 0) if the rank owns nothing of it. With `layout="rows"`: flatten.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

CPU_ALIGNMENT_NBYTES = 64
"""One cache line, as in an ordinary allocation on the CPU."""
DEVICE_ALIGNMENT_NBYTES = 256
"""The largest alignment that vendors' matrix libraries distinguish (cublasLt: up to 256 bytes);
torch's allocators for devices give more."""


def alignment_of(device_type: str, itemsize: int) -> int:
    """Alignment in elements of every parameter and shard in a buffer of elements of `itemsize`.

    Vector loads are then aligned, and matrix products take the same path, and so return the same
    bits, as for a tensor with an allocation of its own. Files do not depend on it: they hold ranges
    of the original parameters.
    """
    nbytes = CPU_ALIGNMENT_NBYTES if device_type == "cpu" else DEVICE_ALIGNMENT_NBYTES
    return max(1, nbytes // itemsize)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


class ShardRange(NamedTuple):
    """Elements [start, stop) of the flattened parameter `param`, at `offset` in a buffer."""

    param: int
    start: int
    stop: int
    offset: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class FlatLayout:
    """Places parameters in one flat buffer that is split evenly over a group."""

    numels: tuple[int, ...]
    starts: tuple[int, ...]
    alignment: int
    group_size: int
    shard_numel: int
    slices: int
    """Number of equal slices of a shard; each slice is a multiple of the alignment."""

    @classmethod
    def build(
        cls, numels: Sequence[int], group_size: int, alignment: int = 1, slices: int = 1
    ) -> FlatLayout:
        """Lay out parameters of `numels` elements for `group_size` owners.

        Args:
            alignment: in elements; every start and every slice of a shard is a multiple of it.
            slices: number of equal slices into which each shard can be cut.
        """
        starts = []
        end = 0
        for numel in numels:
            start = round_up(end, alignment)
            starts.append(start)
            end = start + numel
        shard_numel = round_up(-(-end // group_size), alignment * slices)
        return cls(tuple(numels), tuple(starts), alignment, group_size, shard_numel, slices)

    @property
    def padded_numel(self) -> int:
        return self.group_size * self.shard_numel

    def owned_range(self, index: int, rank: int) -> tuple[int, int]:
        """(start, stop) in the flattened parameter `index` that `rank` owns."""
        start = max(rank * self.shard_numel - self.starts[index], 0)
        stop = min((rank + 1) * self.shard_numel - self.starts[index], self.numels[index])
        return (start, stop) if start < stop else (0, 0)

    def shard_ranges(self, rank: int) -> tuple[ShardRange, ...]:
        """One range per parameter, in order, with offsets in the shard of `rank`; may be empty."""
        ranges = []
        for index, numel_start in enumerate(self.starts):
            start, stop = self.owned_range(index, rank)
            offset = numel_start + start - rank * self.shard_numel if stop > start else 0
            ranges.append(ShardRange(index, start, stop, offset))
        return tuple(ranges)


@dataclass(frozen=True)
class GradientLayout:
    """The reduction's input: one chunk per rank, with the parts of the gradients that it owns.

    If every parameter is trainable, this is the flat layout itself, and each gradient is one
    contiguous run. If some are frozen, the others are packed more tightly, so that frozen
    parameters cost no bytes; a gradient that several ranks own is then cut at chunk borders.

    Size and construction are O(parameters) for any group size: chunks are computed on demand.
    """

    trainable: tuple[int, ...]
    segments: tuple[ShardRange, ...]
    """Position of the gradients in the whole buffer: non-empty, in rising order of offset."""
    chunk_numel: int
    num_chunks: int

    @classmethod
    def build(cls, layout: FlatLayout, trainable: Sequence[int]) -> GradientLayout:
        """Lay out gradients of the parameters `trainable` (rising indices into `layout`)."""
        trainable = tuple(trainable)
        if len(trainable) == len(layout.numels):
            chunk_numel = layout.shard_numel
            runs = [
                ShardRange(index, 0, numel, start)
                for index, (numel, start) in enumerate(
                    zip(layout.numels, layout.starts, strict=True)
                )
                if numel
            ]
        else:
            chunk_numel, runs = _pack(layout, trainable)
        return cls(trainable, tuple(runs), chunk_numel, layout.group_size)

    @property
    def numel(self) -> int:
        return self.num_chunks * self.chunk_numel

    def runs_in(self, begin: int, numel: int) -> Iterator[ShardRange]:
        """Parts of gradients in [begin, begin + numel) of the buffer, with offsets in that."""
        for param, start, stop, offset in self.segments:
            first = max(begin - offset, 0)
            last = min(begin + numel - offset, stop - start)
            if first < last:
                yield ShardRange(param, start + first, start + last, offset + first - begin)


def _pack(layout: FlatLayout, trainable: Sequence[int]) -> tuple[int, list[ShardRange]]:
    """Return (chunk_numel, segments) without the frozen parameters.

    A parameter has at most three runs: the end of one shard, the shards that it fills, and the
    beginning of another. If any parameter fills a shard, chunks are as long as shards; so the
    chunks it fills are adjacent, and one run covers any number of them.
    """
    shard_numel = layout.shard_numel
    runs: list[tuple[int, ShardRange]] = []  # (rank of the first chunk, run with its offset there)
    longest = 0
    last_rank, end = -1, 0
    for index in trainable:
        position, stop = 0, layout.numels[index]
        while position < stop:
            rank, place = divmod(layout.starts[index] + position, shard_numel)
            offset = round_up(end, layout.alignment) if rank == last_rank else 0
            filled = 0 if place else (stop - position) // shard_numel
            numel = filled * shard_numel or min(stop - position, shard_numel - place)
            runs.append((rank, ShardRange(index, position, position + numel, offset)))
            position += numel
            last_rank = rank + max(filled, 1) - 1
            end = shard_numel if filled else offset + numel
            longest = max(longest, end)
    chunk_numel = round_up(longest, layout.alignment * layout.slices)
    segments = [run._replace(offset=rank * chunk_numel + run.offset) for rank, run in runs]
    return chunk_numel, segments
