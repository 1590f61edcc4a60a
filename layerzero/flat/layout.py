"""FlatLayout: offsets of parameters, and of their gradients, in buffers; integers only.

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

    def runs_in(self, begin: int, numel: int) -> Iterator[ShardRange]:
        """Parts of parameters in [begin, begin + numel) of the buffer, with offsets in that."""
        for index, (start, whole) in enumerate(zip(self.starts, self.numels, strict=True)):
            first, last = max(begin - start, 0), min(begin + numel - start, whole)
            if first < last:
                yield ShardRange(index, first, last, start + first - begin)
