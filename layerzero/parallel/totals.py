"""Small tensors of a whole model: totals over all of its ranks, and equal buffers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from layerzero.comm.exchanges import broadcast_from_first, gather_along, gather_small
from layerzero.comm.pending import Operation
from layerzero.flat.groups import make_shard_group
from layerzero.flat.placement import ShardGroup
from layerzero.flat.tensor_parallel import local_of
from layerzero.step.operations import remembers_failure
from layerzero.step.root import RootState


class Totals:
    """Gathers and sums small tensors over several groups, with the same result on each rank.

    Operations have numbers of their own: the ranks of other groups have other models, which count
    their collectives differently.
    """

    def __init__(
        self,
        root: RootState,
        groups: Sequence[ShardGroup],
        other_groups: Sequence[dist.ProcessGroup] = (),
    ) -> None:
        """`root`: a model on this rank, whose timeouts apply. `groups`: of this model. Others are
        further axes, such as tensor- and pipeline-parallel ranks."""
        timeout = groups[0].timeout if groups else None
        made = [make_shard_group(group, root.device, timeout) for group in other_groups]
        for group in made:
            root.operations.phases.cover(group)
        self._groups = tuple(group for group in (*groups, *made) if group.size > 1)
        self._num_operations = 0

    def gather(self, name: str, own: torch.Tensor) -> torch.Tensor:
        """`own` of every rank along each axis: [ranks of the last group, ..., *shape]. `name`: of
        the operation in errors."""
        return gather_along(own, self._groups, lambda group: self._operation(name))

    def sum(self, name: str, own: torch.Tensor) -> torch.Tensor:
        """The sum of `own` over all ranks, in rank order; otherwise as `gather`."""
        for group in self._groups:
            own = gather_small(own, group, self._operation(name)).sum(dim=0)
        return own

    def _operation(self, name: str) -> Operation:
        self._num_operations += 1
        return Operation(name, "the model", self._num_operations)


@remembers_failure
@torch.no_grad()
def broadcast_buffers(root: RootState, buffers: Iterable[torch.Tensor]) -> None:
    """Broadcast the first rank's values, one after the other. Collective over the model's ranks;
    blocks the host."""
    name = partial(root.operations.next, "synchronisation", "buffers")
    for local in map(local_of, buffers):
        value = local.to(root.device).contiguous()
        local.copy_(broadcast_from_first(value, root.groups, name))
