"""The collectives of a step: all-gather and reduce-scatter on 1-D tensors.

Each verb uses the call that suits the backend. On gloo that is messages between pairs of ranks
(messages.py), and the engine sums a reduction itself. exchanges.py has those of small tensors.

Note [Rank order]
    Parts are added in rank order, in float32 at least, so a sum does not depend on arrival order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions, ReduceScatterOptions

from layerzero.comm.gloo import messages
from layerzero.comm.pending import Operation, Pending, messages_carry_names
from layerzero.flat.placement import ShardGroup
from layerzero.ops import ordered_sum_

# Backends whose reductions can average (ReduceOp.AVG), which saves the scaling afterwards.
_AVERAGING_BACKENDS = ("nccl", "xccl", "fake")
# Dtypes that every backend sends. Others are sent as bytes: NCCL has no int16 or complex numbers.
SENT_BY_ALL = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
SENT_BY_ALL |= {torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool}
# Backends that run a collective on the current stream if `asyncOp` is False, and return no Work.
# Then it has the priority of that stream, and no stream of the backend has to be waited for.
ON_CURRENT_STREAM = ("nccl", "xccl")
# Methods of the process group; torch 2.13 introduced the first name of each pair. They are called
# directly because the wrappers in torch.distributed (checks, complex views, coalescing) cost more
# host time than the rest of a gather.
_HAS_SINGLE = hasattr(dist.ProcessGroup, "all_gather_single")
_ALL_GATHER = "all_gather_single" if _HAS_SINGLE else "_allgather_base"
_REDUCE_SCATTER = "reduce_scatter_single" if _HAS_SINGLE else "_reduce_scatter_base"

Add = Callable[[torch.Tensor, list[torch.Tensor], float], object]
"""Writes the sum of parts, times a scale; see `reduce_in_order`."""


def all_gather(
    full: torch.Tensor, shard: torch.Tensor, group: ShardGroup, operation: Operation
) -> Pending:
    """Gather every rank's shard into `full`. Collective over the group; does not block the host.

    Args:
        full: [group_size * shard_numel]; written.
        shard: [shard_numel] in the same dtype; may be this rank's slice of `full`. Must not
            change before `wait()` of the returned handle.
    """
    if not messages_carry_names(group, shard.device):
        return start(operation, full.nbytes, group, _issue_all_gather, full, shard, group)
    slices = slices_of(full, group)
    if slices[group.rank].data_ptr() != shard.data_ptr():
        slices[group.rank].copy_(shard)
    return messages.exchange(slices, [shard] * group.size, group, operation)


def slices_of(full: torch.Tensor, group: ShardGroup) -> list[torch.Tensor]:
    """Views of `full`, the part of each rank."""
    numel = full.numel() // group.size
    return [full[peer * numel : (peer + 1) * numel] for peer in range(group.size)]


def reduce_scatter(
    chunks: torch.Tensor,
    group: ShardGroup,
    operation: Operation,
    scale: float = 1.0,
    deterministic: bool = False,
    order: Sequence[int] | None = None,
    out: torch.Tensor | None = None,
    add: Add = ordered_sum_,
) -> tuple[torch.Tensor, Pending]:
    """Sum chunk r of every rank's `chunks` on rank r. Collective; does not block the host.

    Args:
        chunks: [group_size * chunk_numel] in the dtype that is sent; must not change before
            `wait()` of the returned handle, and may be overwritten.
        scale: factor on the sum (1 / group_size makes a mean).
        deterministic: sum in rank order, in float32 at least, on every backend; gloo always does.
        order: rank r receives chunk order[r] instead of r; used only where the engine sums.
        out: [chunk_numel] memory for the sum, in the dtype of what is returned; None: new memory.
        add: see `reduce_in_order`; used only where the engine sums.

    Returns:
        ([chunk_numel] scaled sum, valid after `wait()` of the handle; the handle). The sum is
        float32 (float64 for float64) where the engine sums, else in the dtype that is sent.
    """
    chunk_numel = chunks.numel() // group.size
    if not (messages_carry_names(group, chunks.device) or deterministic):
        op = dist.ReduceOp.SUM
        if scale == 1.0 / group.size and group.backend in _AVERAGING_BACKENDS:
            op, scale = dist.ReduceOp.AVG, 1.0
        elif scale != 1.0 and chunks.dtype == torch.float16:
            # Scale first: an unscaled sum may exceed the largest float16, 65504.
            chunks.mul_(scale)
            scale = 1.0
        summed = chunks.new_empty(chunk_numel) if out is None else out
        call = summed, chunks, op, group
        pending = start(operation, chunks.nbytes, group, _issue_reduce_scatter, *call)
        if scale != 1.0:
            pending.then(partial(summed.mul_, scale))
        return summed, pending
    return reduce_in_order(chunks, group, operation, scale, order, out, add)


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


def reduce_with_peer(
    own: torch.Tensor,
    received: torch.Tensor,
    sent: torch.Tensor,
    group: ShardGroup,
    operation: Operation,
    scale: float = 1.0,
    add: Add = ordered_sum_,
) -> tuple[torch.Tensor, Pending]:
    """`reduce_scatter` between two ranks, where messages carry names. Collective; does not block.

    Args:
        own: [chunk_numel], this rank's chunk; the scaled sum is written there.
        received: [chunk_numel] for the peer's part of it; see `messages.exchange_halves`.
        sent: [chunk_numel], the peer's chunk; is overwritten.
        add: see `reduce_in_order`.

    Returns:
        (`own`, valid after `wait()` of the handle; the handle).
    """
    pending = messages.exchange_halves(received, sent, group, operation)
    parts = [own, received] if group.rank == 0 else [received, own]
    pending.then(partial(add, own, parts, scale))
    return own, pending


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
        call = all_to_all_on(group), received, given
        pending = start(operation, given.nbytes, group, *call)
        return list(received.chunk(group.size)), pending
    return messages.exchange_in_place(own, group, operation)


def all_to_all_on(group: ShardGroup) -> Callable[..., dist.Work | None]:
    """The backend's own, for `start`."""
    has_work = group.backend not in ON_CURRENT_STREAM
    return partial(dist.all_to_all_single, group=group.process_group, async_op=has_work)


def start(
    operation: Operation,
    nbytes: int,
    group: ShardGroup,
    issue: Callable[..., dist.Work | None],
    *args: Any,
) -> Pending:
    """Issue one of the backend's own collectives, which the watchdog then watches.

    Raises:
        CollectiveError: as `Pending.start`.
    """
    pending = Pending(operation, group, nbytes)
    if operation.watchdog is not None:
        operation.watchdog.watch(pending)
    pending.start(issue, *args)
    return pending


def _issue_all_gather(
    full: torch.Tensor, shard: torch.Tensor, group: ShardGroup
) -> dist.Work | None:
    if full.dtype not in SENT_BY_ALL:
        full, shard = full.view(torch.uint8), shard.view(torch.uint8)
    return getattr(group.process_group, _ALL_GATHER)(full, shard, _options(group.backend))


def _issue_reduce_scatter(
    summed: torch.Tensor, chunks: torch.Tensor, op: dist.ReduceOp.RedOpType, group: ShardGroup
) -> dist.Work | None:
    # Backends have no complex dtypes; torch.distributed's own functions do this as well.
    if chunks.is_complex():
        summed, chunks = torch.view_as_real(summed), torch.view_as_real(chunks)
    options = _options(group.backend, op)
    return getattr(group.process_group, _REDUCE_SCATTER)(summed, chunks, options)


@cache
def _options(backend: str, op: dist.ReduceOp.RedOpType | None = None) -> Any:
    """Options of a reduce-scatter; without `op`, of an all-gather."""
    options: Any = AllgatherOptions()
    if op is not None:
        options = ReduceScatterOptions()
        options.reduceOp = dist.ReduceOp(op)
    options.asyncOp = backend not in ON_CURRENT_STREAM
    return options
