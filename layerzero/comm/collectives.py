"""The collectives of a step: all-gather and reduce-scatter on 1-D tensors.

Each verb uses the call that suits the backend. On gloo that is messages between pairs of ranks
(messages.py), and the engine sums a reduction itself (ordered_sums.py). exchanges.py has those of
small tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions, ReduceScatterOptions

from layerzero.comm.gloo import messages
from layerzero.comm.ordered_sums import ON_CURRENT_STREAM, reduce_in_order
from layerzero.comm.pending import Operation, Pending, messages_carry_names, start
from layerzero.flat.placement import ShardGroup

# Backends whose reductions can average (ReduceOp.AVG), which saves the scaling afterwards.
_AVERAGING_BACKENDS = ("nccl", "xccl", "fake")
# Dtypes that every backend sends. Others are sent as bytes: NCCL has no int16 or complex numbers.
SENT_BY_ALL = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
SENT_BY_ALL |= {torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool}
# Methods of the process group; torch 2.13 introduced the first name of each pair. They are called
# directly because the wrappers in torch.distributed (checks, complex views, coalescing) cost more
# host time than the rest of a gather.
_HAS_SINGLE = hasattr(dist.ProcessGroup, "all_gather_single")
_ALL_GATHER = "all_gather_single" if _HAS_SINGLE else "_allgather_base"
_REDUCE_SCATTER = "reduce_scatter_single" if _HAS_SINGLE else "_reduce_scatter_base"


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
        call = partial(_issue_all_gather, full, shard, group)
        return start(operation, full.nbytes, group, call)
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
) -> tuple[torch.Tensor, Pending]:
    """Sum chunk r of every rank's `chunks` on rank r. Collective; does not block the host.

    Args:
        chunks: [group_size * chunk_numel] in the dtype that is sent; must not change before
            `wait()` of the returned handle, and may be overwritten.
        scale: factor on the sum (1 / group_size makes a mean).
        deterministic: sum in rank order, in float32 at least, on every backend; gloo always does.
        order: rank r receives chunk order[r] instead of r; used only where the engine sums.
        out: [chunk_numel] memory for the sum, in the dtype of what is returned; None: new memory.

    Returns:
        ([chunk_numel] scaled sum, valid after `wait()` of the handle; the handle). The sum is
        float32 (float64 for float64) where the engine sums, else in the dtype that is sent.
    """
    if not (messages_carry_names(group, chunks.device) or deterministic):
        op = dist.ReduceOp.SUM
        if scale == 1.0 / group.size and group.backend in _AVERAGING_BACKENDS:
            op, scale = dist.ReduceOp.AVG, 1.0
        elif scale != 1.0 and chunks.dtype == torch.float16:
            # Scale first: an unscaled sum may exceed the largest float16, 65504.
            chunks.mul_(scale)
            scale = 1.0
        summed = chunks.new_empty(chunks.numel() // group.size) if out is None else out
        call = partial(_issue_reduce_scatter, summed, chunks, op, group)
        pending = start(operation, chunks.nbytes, group, call)
        if scale != 1.0:
            pending.then(partial(summed.mul_, scale))
        return summed, pending
    return reduce_in_order(chunks, group, operation, scale, order, out)


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
