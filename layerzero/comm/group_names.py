"""Makes ranks agree on the names that torch gives to new process groups.

torch derives the name of a group that only its members create (`use_local_synchronization=True`)
from its ranks and from a number: of the groups that the creating process has, or, from torch 2.14
on, of the groups that it has created. After a group was made on some ranks only, as for the first
and last stage of a pipeline, these numbers differ: ranks would wait for each other under different
names until the timeout.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from layerzero.comm.collectives import gather_small
from layerzero.comm.new_groups import new_group
from layerzero.comm.pending import Operation
from layerzero.flat.groups import ShardGroup


def agree_on_group_names(
    groups: Sequence[ShardGroup], device: torch.device, what: str = "the number of process groups"
) -> None:
    """Give the next group that ranks create the same name on all of them.

    Collective over `groups`, in order. A rank whose number is below another's creates
    single-rank groups until the numbers match.

    Args:
        groups: groups that together connect all ranks: of a grid of ranks, one along each axis.
        device: a device that all their backends serve.
        what: what the groups are for, which the error names if a rank does not take part.

    Raises:
        CollectiveError: a rank did not take part within the timeout.
    """
    number = torch.tensor([_number_in_names()], device=device)
    for group in groups:
        if group.size > 1:
            operation = Operation("exchange", what, 0)
            number = gather_small(number, group, operation).max().view(1)
    for _ in range(int(number) - _number_in_names()):
        new_group([dist.get_rank()], "gloo", description="layerzero: counts only")


def _number_in_names() -> int:
    """The number that torch puts into the next name; there is no public way to read it."""
    c10d = dist.distributed_c10d
    counts_created = "group_count" in c10d._hash_ranks_to_str.__code__.co_names
    return c10d._world.group_count if counts_created else len(c10d._world.pg_names)
