"""Reductions that the engine sums itself: on gloo, and everywhere with `deterministic`.

In rank order, in float32 at least, so that a sum does not depend on arrival order (decision 0010).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from layerzero.comm.gloo import messages
from layerzero.comm.pending import Operation, Pending, messages_carry_names, start
from layerzero.flat.placement import ShardGroup
from layerzero.ops import ordered_sum_

# Backends that run a collective on the current stream if `asyncOp` is False, and return no Work.
# Then it has the priority of that stream, and no stream of the backend has to be waited for.
ON_CURRENT_STREAM = ("nccl", "xccl")
Add = Callable[[torch.Tensor, list[torch.Tensor], float], object]
"""Writes the sum of parts, times a scale; see `reduce_in_order`."""


def reduce_in_order(
    chunks: torch.Tensor,
    group: ShardGroup,
    operation: Operation,
    scale: float = 1.0,
    order: Sequence[int] | None = None,
    out: torch.Tensor | None = None,
    add: Add = ordered_sum_,
) -> tuple[torch.Tensor, Pending]:
    """`reduce_scatter` as an all-to-all and a sum by the engine, which `add` does.

    Overwrites `chunks` where messages carry names. `add` receives the sum to write, which may be
    one of the parts, the parts in rank order, and the scale.
    """
    chunk_numel = chunks.numel() // group.size
    dtype = torch.promote_types(chunks.dtype, torch.float32)
    parts, pending = _all_to_all(chunks, group, operation, order)
    if out is not None:
        summed = out
    elif dtype == chunks.dtype and messages_carry_names(group, chunks.device) and group.size > 1:
        # The part of the first step is memory of its own, in the right dtype: sum into it.
        summed = parts[group.rank - 1]
    else:
        summed = torch.empty(chunk_numel, dtype=dtype, device=chunks.device)
    pending.then(partial(add, summed, parts, scale))
    return summed, pending


def _all_to_all(
    chunks: torch.Tensor, group: ShardGroup, operation: Operation, order: Sequence[int] | None
) -> tuple[list[torch.Tensor], Pending]:
    """Send chunk order[i] to rank i; return the part from each rank, and the handle."""
    own = list(chunks.chunk(group.size))
    if order is not None:
        own = [own[place] for place in order]
    if not messages_carry_names(group, chunks.device):
        given = chunks if order is None else torch.cat(own)
        received = torch.empty_like(given)
        pending = start(operation, given.nbytes, group, all_to_all_on(group, received, given))
        return list(received.chunk(group.size)), pending
    return messages.exchange_in_place(own, group, operation)


def all_to_all_on(group: ShardGroup, *args: Any) -> Callable[[], dist.Work | None]:
    """The backend's own with these arguments, for `start`."""
    has_work = group.backend not in ON_CURRENT_STREAM
    call = partial(dist.all_to_all_single, group=group.process_group, async_op=has_work)
    return partial(call, *args)
