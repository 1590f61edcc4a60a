"""Which rank owns each whole tensor, and what a step sends. Integers only, equal on every rank.

    shard of rank 0  | a a a a b b |        rank 0 owns a, rank 1 owns b:
    shard of rank 1  | b b b b b b |        2 elements of b travel to rank 1, and back

A tensor consists of blocks, one unless it is split over tensor-parallel ranks, and a block of
pieces, one for each main shard that holds a part of it. Ranks may hold copies (`outer="replicate"`,
tensor-parallel copies): a replica is a set of pieces that holds each element once. The owner takes
gradients from its own replica, and returns values to all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

_SLACK = 0.01
"""Ranks whose loads differ by less than this part of the mean load count as equally loaded."""


class Piece(NamedTuple):
    """Elements [start, stop) of a flattened block, which rank `holder` has."""

    start: int
    stop: int
    holder: int
    block: int = 0


class Move(NamedTuple):
    """A piece of a numbered tensor, on its way from one rank to another, or to itself."""

    tensor: int
    block: int
    start: int
    stop: int
    nbytes: int
    source: int
    target: int


@dataclass(frozen=True)
class WholeTensor:
    """A whole tensor, its owner, and where its elements are between steps."""

    itemsize: int
    owner: int
    replicas: tuple[tuple[Piece, ...], ...]
    source: int = 0
    """The replica that sends gradients: the owner's."""

    @property
    def lies_with_owner(self) -> bool:
        """Whether the owner's shard holds all elements."""
        pieces = self.replicas[self.source]
        return len(pieces) == 1 and pieces[0].holder == self.owner

    def moves(self, number: int, to_owner: bool) -> Iterator[Move]:
        """The moves of all elements to the owner, or back to every copy."""
        replicas = (self.replicas[self.source],) if to_owner else self.replicas
        for start, stop, holder, block in chain.from_iterable(replicas):
            ends = (holder, self.owner) if to_owner else (self.owner, holder)
            yield Move(number, block, start, stop, (stop - start) * self.itemsize, *ends)


def assign_owners(
    costs: Sequence[float],
    held: Sequence[Mapping[int, int]],
    num_ranks: int,
    loads: Sequence[float] | None = None,
) -> list[int]:
    """The owner of each tensor, a number below `num_ranks`.

    Tensors are placed by falling cost, each on a rank with the least cost so far. Among ranks that
    are almost equally loaded, the one that holds most of the elements gets it: these need not be
    sent.

    Args:
        costs: cost of each tensor, >= 0.
        held: for each tensor, the number of its elements that each rank holds; ranks without any
            may be left out.
        loads: cost that each rank owns already; None: nothing.
    """
    totals = [0.0] * num_ranks if loads is None else list(loads)
    slack = _SLACK * (sum(totals) + sum(costs)) / num_ranks
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        limit = min(totals) + slack
        candidates = [rank for rank in range(num_ranks) if totals[rank] <= limit]
        owner = min(candidates, key=lambda rank: (-held[index].get(rank, 0), totals[rank], rank))
        owners[index] = owner
        totals[owner] += costs[index]
    return owners


class Transfer(NamedTuple):
    """What one rank sends and receives in one exchange."""

    outgoing: list[Move]
    """By rising target; of each target, in an order that it shares."""
    incoming: list[Move]
    """By rising source."""
    own: list[Move]
    """Those that never leave the rank."""
    sent: list[int]
    """Bytes to each rank."""
    received: list[int]
    """Bytes from each rank."""
    nbytes: int
    """Sum over all ranks of what is sent."""


def _transfer_of(moves: Sequence[Move], rank: int, num_ranks: int) -> Transfer:
    away = [move for move in moves if move.source != move.target]
    outgoing = sorted((m for m in away if m.source == rank), key=lambda move: move.target)
    incoming = sorted((m for m in away if m.target == rank), key=lambda move: move.source)
    sent, received = [0] * num_ranks, [0] * num_ranks
    for move in outgoing:
        sent[move.target] += move.nbytes
    for move in incoming:
        received[move.source] += move.nbytes
    own = [move for move in moves if move.source == move.target == rank]
    return Transfer(outgoing, incoming, own, sent, received, sum(move.nbytes for move in away))


class Bucket(NamedTuple):
    """Tensors whose pieces travel together."""

    tensors: list[int]
    to_owners: Transfer
    from_owners: Transfer


def make_buckets(
    tensors: Sequence[tuple[int, WholeTensor]], rank: int, num_ranks: int, limit: int
) -> list[Bucket]:
    """Cut numbered tensors into buckets, in order; the same cuts on every rank. `limit`: bytes that
    a rank may send or receive in one bucket, unless one tensor has more."""
    cuts: list[list[tuple[int, WholeTensor]]] = []
    loads: Counter[tuple[str, bool, int]] = Counter()
    for number, whole in tensors:
        added: Counter[tuple[str, bool, int]] = Counter()
        for to_owner in (True, False):
            for move in whole.moves(number, to_owner):
                added["out of", to_owner, move.source] += move.nbytes
                added["into", to_owner, move.target] += move.nbytes
        loads = loads + added
        if not cuts or max(loads.values(), default=0) > limit:
            cuts.append([])
            loads = added
        cuts[-1].append((number, whole))
    return [
        Bucket(
            [number for number, _ in cut],
            *(
                _transfer_of([m for n, whole in cut for m in whole.moves(n, way)], rank, num_ranks)
                for way in (True, False)
            ),
        )
        for cut in cuts
    ]
