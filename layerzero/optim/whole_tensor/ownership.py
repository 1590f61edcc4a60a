"""Chooses the owner of each whole tensor. Integers only: every rank computes the same owners.

Tensors are placed by falling cost, each on a rank with the least cost so far. Among ranks that are
almost equally loaded, the one that already holds most of the tensor's elements gets it: these
elements need not be sent.

    costs 9 6 6 4 4 1, two ranks     rank 0: 9 4 1 = 14 ... rank 1: 6 6 4 = 16
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_SLACK = 0.01
"""Ranks whose loads differ by less than this part of the mean load count as equally loaded."""


def assign_owners(
    costs: Sequence[float],
    held: Sequence[Mapping[int, int]],
    num_ranks: int,
    loads: Sequence[float] | None = None,
) -> list[int]:
    """The owner of each tensor, a number below `num_ranks`.

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
