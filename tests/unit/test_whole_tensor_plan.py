"""Owners of whole tensors, and what a step sends: integers, without processes."""

import random

import pytest

from layerzero.flat.layout import FlatLayout
from layerzero.optim.whole_tensor.plan import (
    Bucket,
    Move,
    Piece,
    WholeTensor,
    assign_owners,
    make_buckets,
)


def test_an_earlier_load_is_evened_out() -> None:
    owners = assign_owners([1] * 10, [{}] * 10, 2, loads=[6, 0])
    assert owners.count(0) == 2


def test_the_owner_holds_most_where_loads_are_equal() -> None:
    held = [{2: 5, 1: 4}, {0: 9}, {1: 1}]
    assert assign_owners([1, 1, 1], held, 3) == [2, 0, 1]


def _pieces(layout: FlatLayout, index: int, holders: range) -> tuple[Piece, ...]:
    ranges = [(*layout.owned_range(index, shard), rank) for shard, rank in enumerate(holders)]
    return tuple(Piece(*each) for each in ranges if each[0] < each[1])


def _random_tensors(seed: int, num_ranks: int, copies: int) -> list[WholeTensor]:
    """Replica k is on ranks k * num_ranks and those that follow."""
    draw = random.Random(seed)
    layout = FlatLayout.build(
        [draw.choice([0, 1, 3, 40, 200]) for _ in range(12)], num_ranks, 4, copies
    )
    replicas = [
        tuple(
            _pieces(layout, index, range(copy * num_ranks, (copy + 1) * num_ranks))
            for copy in range(copies)
        )
        for index in range(12)
    ]
    held = [{p.holder: p.stop - p.start for r in each for p in r} for each in replicas]
    owners = assign_owners(layout.numels, held, num_ranks * copies)
    return [
        WholeTensor(4, owner, each, owner // num_ranks)
        for owner, each in zip(owners, replicas, strict=True)
    ]


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_every_element_reaches_its_owner_and_comes_back_once(num_ranks: int, copies: int) -> None:
    tensors = _random_tensors(num_ranks, num_ranks, copies)
    total = num_ranks * copies
    numbered = list(enumerate(tensors))
    plans = [make_buckets(numbered, rank, total, 300) for rank in range(total)]
    assert len({len(plan) for plan in plans}) == 1 and len(plans[0]) > 1
    arrived: dict[int, list[int]] = {}
    returned: dict[tuple[int, int], list[int]] = {}
    for buckets in zip(*plans, strict=True):
        _check_ends(buckets)
        for rank, bucket in enumerate(buckets):
            for span in _received(bucket, 0):
                assert tensors[span.tensor].owner == rank
                arrived.setdefault(span.tensor, []).extend(range(span.start, span.stop))
            for span in _received(bucket, 1):
                returned.setdefault((rank, span.tensor), []).extend(range(span.start, span.stop))
    for number, whole in numbered:
        numel = sum(piece.stop - piece.start for piece in whole.replicas[0])
        assert sorted(arrived.get(number, [])) == list(range(numel))
        for piece in (piece for replica in whole.replicas for piece in replica):
            assert returned[piece.holder, number] == list(range(piece.start, piece.stop))


def _received(bucket: Bucket, way: int) -> list[Move]:
    transfer = (bucket.to_owners, bucket.from_owners)[way]
    return [*transfer.own, *transfer.incoming]


def _check_ends(buckets: tuple[Bucket, ...]) -> None:
    """What one rank sends to another is what that one expects, and is counted."""
    for way in ("to_owners", "from_owners"):
        transfers = [getattr(bucket, way) for bucket in buckets]
        for source, transfer in enumerate(transfers):
            for target, other in enumerate(transfers):
                moves = [move for move in transfer.outgoing if move.target == target]
                assert moves == [move for move in other.incoming if move.source == source]
                nbytes = sum(move.nbytes for move in moves)
                assert nbytes == transfer.sent[target] == other.received[source]
            targets = [move.target for move in transfer.outgoing]
            assert targets == sorted(targets)
        total = sum(nbytes for transfer in transfers for nbytes in transfer.sent)
        assert {transfer.nbytes for transfer in transfers} == {total}


def test_nothing_travels_for_tensors_that_lie_with_their_owner() -> None:
    layout = FlatLayout.build([8, 8], 2)
    tensors = [WholeTensor(4, index, (_pieces(layout, index, range(2)),)) for index in range(2)]
    (bucket,) = make_buckets(list(enumerate(tensors)), 0, 2, 1 << 20)
    assert all(whole.lies_with_owner for whole in tensors)
    assert (bucket.to_owners.nbytes, bucket.from_owners.nbytes) == (0, 0)
