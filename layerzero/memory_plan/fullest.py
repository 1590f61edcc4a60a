"""Which ranks may hold the most: all have equal shards, but not equal parts of parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from layerzero.flat.flat_param import FlatParam


def fullest_ranks(handles: Iterable[FlatParam], candidates: Collection[int]) -> list[int]:
    """The rank with the most elements, and the one with the largest piece of a parameter.

    Optimizer state has the size of the pieces; temporaries of `optimizer.step()` that of one piece.

    Args:
        candidates: the ranks to choose from; rising.
    """
    totals: dict[int, int] = {}
    largest: dict[int, int] = {}
    for handle in handles:
        itemsize, holders = handle.main_shard.itemsize, handle.placement.holders()
        for shard, numel in _pieces(handle):
            rank = next((each for each in holders[shard] if each in candidates), None)
            if rank is not None:
                totals[rank] = totals.get(rank, 0) + numel * itemsize
                largest[rank] = max(largest.get(rank, 0), numel * itemsize)
    if not totals:
        return [min(candidates)]
    found = {max(of, key=lambda rank: (of[rank], -rank)) for of in (totals, largest)}
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
