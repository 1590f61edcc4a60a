"""What a step sends between shards and owners, in buckets. Integers only.

    shard of rank 0  | a a a a b b |        rank 0 owns a, rank 1 owns b:
    shard of rank 1  | b b b b b b |        2 elements of b travel to rank 1, and back

A tensor consists of blocks, one unless it is split over tensor-parallel ranks, and a block of
pieces, one for each main shard that holds a part of it. Ranks may hold copies (`outer="replicate"`,
tensor-parallel copies): a replica is a set of pieces that holds each element once. The owner takes
gradients from its own replica, and returns values to all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from layerzero.flat.layout import FlatLayout


class Piece(NamedTuple):
    """Elements [start, stop) of a flattened block, which rank `holder` has."""

    start: int
    stop: int
    holder: int
    block: int = 0


class Span(NamedTuple):
    """Elements [start, stop) of a flattened block of the whole tensor `tensor`."""

    tensor: int
    block: int
    start: int
    stop: int
    nbytes: int


@dataclass(frozen=True)
class WholeTensor:
    """A whole tensor, its owner, and where its elements are between steps."""

    itemsize: int
    owner: int
    replicas: tuple[tuple[Piece, ...], ...]
    source: int = 0
    """The replica that sends gradients: the owner's."""

    @property
    def sources(self) -> tuple[Piece, ...]:
        return self.replicas[self.source]

    @property
    def lies_with_owner(self) -> bool:
        """Whether the owner's shard holds all elements."""
        return len(self.sources) == 1 and self.sources[0].holder == self.owner


def pieces_of(
    layout: FlatLayout, index: int, holders: Sequence[int], block: int = 0
) -> tuple[Piece, ...]:
    """The pieces of parameter `index` of a flat parameter.

    Args:
        holders: the rank that holds each main shard.
    """
    start, numel = layout.starts[index], layout.numels[index]
    if not numel:
        return ()
    shards = range(start // layout.shard_numel, (start + numel - 1) // layout.shard_numel + 1)
    return tuple(
        Piece(*layout.owned_range(index, shard), holders[shard], block) for shard in shards
    )


@dataclass(frozen=True)
class Transfer:
    """What one rank sends and receives in one exchange, by peer; `own` never leaves the rank."""

    outgoing: tuple[tuple[Span, ...], ...]
    incoming: tuple[tuple[Span, ...], ...]
    own: tuple[Span, ...]


@dataclass(frozen=True)
class Bucket:
    """Tensors whose pieces travel together."""

    tensors: tuple[int, ...]
    nbytes: int
    """Bytes that all ranks together send to owners; as many come back to each replica."""
    returned_nbytes: int
    to_owners: Transfer
    from_owners: Transfer


def make_buckets(
    tensors: Sequence[tuple[int, WholeTensor]], rank: int, num_ranks: int, limit: int
) -> list[Bucket]:
    """Cut numbered tensors into buckets, in order; the same cuts on every rank.

    Args:
        limit: bytes that a rank may send or receive in one bucket, unless one tensor has more.
    """
    return [_make_bucket(members, rank, num_ranks) for members in _cut(tensors, num_ranks, limit)]


def _moves(number: int, whole: WholeTensor) -> Iterator[tuple[int, Span]]:
    """(source, span) of each piece on its way to the owner."""
    for piece in whole.sources:
        yield piece.holder, _span(number, whole, piece)


def _returns(number: int, whole: WholeTensor) -> Iterator[tuple[int, Span]]:
    """(target, span) of each piece on its way back; every copy is a target."""
    for replica in whole.replicas:
        for piece in replica:
            yield piece.holder, _span(number, whole, piece)


def _span(number: int, whole: WholeTensor, piece: Piece) -> Span:
    nbytes = (piece.stop - piece.start) * whole.itemsize
    return Span(number, piece.block, piece.start, piece.stop, nbytes)


def _cut(
    tensors: Sequence[tuple[int, WholeTensor]], num_ranks: int, limit: int
) -> Iterator[list[tuple[int, WholeTensor]]]:
    members: list[tuple[int, WholeTensor]] = []
    loads = [[0] * num_ranks for _ in range(4)]
    for number, whole in tensors:
        added = [[0] * num_ranks for _ in range(4)]
        for source, span in _moves(number, whole):
            added[0][source] += span.nbytes
            added[1][whole.owner] += span.nbytes
        for target, span in _returns(number, whole):
            added[2][whole.owner] += span.nbytes
            added[3][target] += span.nbytes
        total = [
            [a + b for a, b in zip(load, more, strict=True)]
            for load, more in zip(loads, added, strict=True)
        ]
        if members and max(map(max, total)) > limit:
            yield members
            members, total = [], added
        members.append((number, whole))
        loads = total
    if members:
        yield members


def _make_bucket(members: list[tuple[int, WholeTensor]], rank: int, num_ranks: int) -> Bucket:
    there = _Builder(rank, num_ranks)
    back = _Builder(rank, num_ranks)
    for number, whole in members:
        for source, span in _moves(number, whole):
            there.add(source, whole.owner, span)
        for target, span in _returns(number, whole):
            back.add(whole.owner, target, span)
    numbers = tuple(number for number, _ in members)
    return Bucket(numbers, there.nbytes, back.nbytes, there.transfer(), back.transfer())


class _Builder:
    def __init__(self, rank: int, num_ranks: int) -> None:
        self._rank = rank
        self._outgoing: list[list[Span]] = [[] for _ in range(num_ranks)]
        self._incoming: list[list[Span]] = [[] for _ in range(num_ranks)]
        self._own: list[Span] = []
        self.nbytes = 0

    def add(self, source: int, target: int, span: Span) -> None:
        if source == target:
            if source == self._rank:
                self._own.append(span)
            return
        self.nbytes += span.nbytes
        if source == self._rank:
            self._outgoing[target].append(span)
        if target == self._rank:
            self._incoming[source].append(span)

    def transfer(self) -> Transfer:
        return Transfer(
            tuple(map(tuple, self._outgoing)), tuple(map(tuple, self._incoming)), tuple(self._own)
        )
