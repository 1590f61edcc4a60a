"""Which ranks may hold the most: all have equal shards, but not equal parts of parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from layerzero.core.flat_param import FlatParam


def fullest_ranks(handles: Iterable[FlatParam], world_size: int) -> list[int]:
    """The rank with the most elements, and the one with the largest piece of a parameter.

    Optimizer state has the size of the pieces; temporaries of `optimizer.step()` that of one piece.
    """
    totals: dict[int, int] = {}
    largest: dict[int, int] = {}
    placement = None
    for handle in handles:
        placement, itemsize = handle.placement, handle.main_shard.itemsize
        for shard, numel in _pieces(handle):
            totals[shard] = totals.get(shard, 0) + numel * itemsize
            largest[shard] = max(largest.get(shard, 0), numel * itemsize)
    if placement is None or not totals:
        return [0]
    rank_of = {shard: ranks[0] for shard, ranks in enumerate(placement.holders())}
    found = {
        rank_of[max(nbytes, key=lambda shard: (nbytes[shard], -rank_of[shard]))]
        for nbytes in (totals, largest)
    }
    return sorted(found)


def _pieces(handle: FlatParam) -> Iterator[tuple[int, int]]:
    """(main shard, elements in it) of each trainable parameter."""
    layout = handle.layout
    for index in handle.gradients.layout.trainable:
        start, numel = layout.starts[index], layout.numels[index]
        if numel:
            last = (start + numel - 1) // layout.shard_numel
            for shard in range(start // layout.shard_numel, last + 1):
                begin, end = layout.owned_range(index, shard)
                yield shard, end - begin
