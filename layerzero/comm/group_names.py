"""New process groups get the same name on all their ranks.

torch names a group that its members alone make (`use_local_synchronization=True`) after its ranks
and after how many groups the one that makes it knows. Whoever made a group for some ranks only, as
for a pipeline's first and last stage, left ranks that know different numbers: they would wait for
each other under different names until the timeout.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from layerzero.comm.collectives import Operation, gather_small
from layerzero.core.groups import ShardGroup


def agree_on_group_names(groups: Sequence[ShardGroup], device: torch.device) -> None:
    """Have ranks name the groups alike that they make next. Collective over `groups`, in order.

    A rank that knows fewer groups than another makes groups of its own, of one rank, up to that
    number.

    Args:
        groups: that lead from each rank to all others; of a grid of ranks, one along each axis.
        device: that the backend of all of them serves.

    Raises:
        CollectiveError: a rank did not come.
    """
    number = torch.tensor([_num_known_groups()], device=device)
    for group in groups:
        if group.size > 1:
            operation = Operation("agreement", "the number of process groups", 0)
            number = gather_small(number, group, operation).max().view(1)
    for _ in range(int(number) - _num_known_groups()):
        dist.new_group(
            [dist.get_rank()],
            backend="gloo",
            use_local_synchronization=True,
            group_desc="layerzero: counts only",
        )


def _num_known_groups() -> int:
    """What torch puts into the names; it has no public way to ask."""
    return len(dist.distributed_c10d._world.pg_names)
