"""The collectives of the engine: all-gather, reduce-scatter and small exchanges on 1-D tensors.

Each verb uses the call that suits the backend. On gloo every pair of ranks has its own connection,
so point-to-point messages go directly from source to destination buffers, and the engine sums a
reduction itself; benchmarks/bench_collectives.py compares both with gloo's own collectives.

Note [A message carries its name]
    Point-to-point messages match by tag. The tag is a hash of the verb, the unit, the operation's
    number in this model, the size, and the model's number on the group. Ranks that issue different
    operations therefore never exchange bytes: they wait, a `Lookout` detects that their paths
    differ, and the error says which rank waits for what. Without the tag, two gathers in swapped
    order would silently mix the weights of two units if their sizes are equal, and would abort the
    process inside gloo if they are not.

Note [Rank order]
    Parts are added in rank order, in float32 at least, so a sum does not depend on arrival order.

Note [Parts arrive where others have left]
    A reduction that the engine sums holds its input, one chunk for each rank, and the parts that
    arrive. With memory for each of these it would hold nearly two inputs. So only the first
    arrivals get memory of their own; each later one goes where a chunk lay that has been sent:

        step        1       2       3       4       5       of rank 0 of 6
        sends       chunk 1 chunk 2 chunk 3 chunk 4 chunk 5
        receives    memory  memory  memory  chunk 1 chunk 2

    In each step every rank sends one chunk and receives one, and half of the steps are under way at
    a time, so no connection is idle because another one is at work. No message is added, and the
    sum still gets all parts at once. `Pending.wait` posts the later receives. They all follow sends
    to which peers have posted the receive at once, so that a rank waits for others no more than
    twice in a row: with a quarter of the parts a step of 8 ranks took longer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions, ReduceScatterOptions

from layerzero.comm.pending import Operation, Pending
from layerzero.core.groups import ShardGroup
from layerzero.ops import ordered_sum_

# Backends whose reductions can average (ReduceOp.AVG), which saves the scaling afterwards.
_AVERAGING_BACKENDS = ("nccl", "xccl", "fake")
# Dtypes that every backend sends. Others are sent as bytes: NCCL has no int16 or complex numbers.
_SENT_BY_ALL = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
_SENT_BY_ALL |= {torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool}
# Backends that run a collective on the current stream if `asyncOp` is False, and return no Work.
# Then it has the priority of that stream, and no stream of the backend has to be waited for.
_ON_CURRENT_STREAM = ("nccl", "xccl")
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
        return _start(operation, full, group, lambda: _issue_all_gather(full, shard, group))
    slices = slices_of(full, group)
    if slices[group.rank].data_ptr() != shard.data_ptr():
        slices[group.rank].copy_(shard)
    return gather_from_peers(slices, shard, group, operation)


def slices_of(full: torch.Tensor, group: ShardGroup) -> list[torch.Tensor]:
    """Views of `full`, the part of each rank."""
    numel = full.numel() // group.size
    return [full[peer * numel : (peer + 1) * numel] for peer in range(group.size)]


def gather_from_peers(
    slices: Sequence[torch.Tensor], shard: torch.Tensor, group: ShardGroup, operation: Operation
) -> Pending:
    """`all_gather` without the copy of this rank's own part; only where messages carry names."""
    return _exchange(slices, [shard] * group.size, group, operation)


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
        pending = _start(
            operation, chunks, group, lambda: _issue_reduce_scatter(summed, chunks, op, group)
        )
        if scale != 1.0:
            pending.then(lambda: _scale(summed, scale))
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
    pending.then(functools.partial(add, summed, parts, scale))
    return summed, pending


def flags_tensor(flags: Sequence[bool], device: torch.device) -> torch.Tensor:
    """[len(flags)] uint8 on `device`. Does not block the host."""
    if all(flags):
        return torch.ones(len(flags), dtype=torch.uint8, device=device)
    return torch.tensor(flags, dtype=torch.uint8).to(device, non_blocking=True)


def gather_flags(
    flags: torch.Tensor, group: ShardGroup, operation: Operation
) -> tuple[torch.Tensor, Pending]:
    """Gather [N] uint8 from every rank. Collective over the group; does not block the host.

    Returns:
        ([group_size, N] uint8, valid after `wait()` of the handle; the handle).
    """
    table = flags.new_empty(group.size, flags.numel())
    return table, all_gather(table.view(-1), flags, group, operation)


def gather_small(tensor: torch.Tensor, group: ShardGroup, operation: Operation) -> torch.Tensor:
    """Gather every rank's `tensor` as [group_size, *shape], in rank order.

    Collective over the group; blocks the host on CPU.
    """
    values = tensor.new_empty(group.size, *tensor.shape)
    all_gather(values.view(-1), tensor.reshape(-1), group, operation).wait()
    return values


def all_to_all(
    received: torch.Tensor,
    received_sizes: Sequence[int],
    sent: torch.Tensor,
    sent_sizes: Sequence[int],
    group: ShardGroup,
    operation: Operation,
    nbytes: int,
) -> Pending:
    """Send each rank its part of `sent`, of any size. Collective; does not block the host.

    Args:
        received: [sum of received_sizes], parts in rank order; written.
        sent: [sum of sent_sizes], parts in rank order, in the same dtype; must not change before
            `wait()` of the returned handle. A part without elements is not sent.
        nbytes: a number that is the same on all ranks, for their comparison.
    """
    if messages_carry_names(group, sent.device):
        incoming = received.split_with_sizes(list(received_sizes))
        outgoing = sent.split_with_sizes(list(sent_sizes))
        return _exchange(incoming, outgoing, group, operation, nbytes)
    pending = Pending(operation, group, nbytes)
    if operation.watchdog is not None:
        operation.watchdog.watch(pending)
    has_work = group.backend not in _ON_CURRENT_STREAM
    pending.start(
        lambda: dist.all_to_all_single(
            received,
            sent,
            list(received_sizes),
            list(sent_sizes),
            group=group.process_group,
            async_op=has_work,
        )
    )
    return pending


def exchange_on_host(
    own: Sequence[int], group: ShardGroup, operation: Operation
) -> list[list[int]]:
    """Gather every rank's numbers, each below 256, in rank order. Collective; blocks the host.

    Args:
        group: a group that serves the CPU. No device is waited for.
    """
    values = torch.tensor(own, dtype=torch.uint8)
    if group.backend == "gloo":
        return gather_small(values, group, operation).tolist()
    table = torch.tensor([list(own)] * group.size, dtype=torch.uint8)
    dist.all_gather_into_tensor(table, values, group=group.process_group)
    return table.tolist()


def broadcast(
    tensor: torch.Tensor, group: ShardGroup, operation: Operation, source: int = 0
) -> Pending:
    """Broadcast from group rank `source`, in place. Collective; does not block the host.

    Where messages carry names, a rank passes the value on only in `wait` of the handle.
    """
    if messages_carry_names(group, tensor.device):
        return _broadcast_down_a_tree(tensor, group, operation, source)
    global_rank, process_group = group.ranks[source], group.process_group
    sent = tensor if tensor.dtype in _SENT_BY_ALL else tensor.view(-1).view(torch.uint8)
    has_work = group.backend not in _ON_CURRENT_STREAM
    return _start(
        operation,
        tensor,
        group,
        lambda: dist.broadcast(sent, global_rank, group=process_group, async_op=has_work),
    )


def _broadcast_down_a_tree(
    tensor: torch.Tensor, group: ShardGroup, operation: Operation, source: int
) -> Pending:
    """The rank at place p, counted from the source, sends to p + 2**k for each 2**k above p.

    gloo's own broadcast waits on a thread of gloo, which a peer that dies amid a message blocks
    until the timeout of the group; destroying the group then waits for that thread.
    """
    size, place = group.size, (group.rank - source) % group.size
    nothing = tensor.new_empty(0)

    def with_ranks(places: Sequence[int]) -> list[torch.Tensor]:
        ranks = {(place + source) % size for place in places}
        return [tensor if rank in ranks else nothing for rank in range(size)]

    first = 1 << place.bit_length()
    steps = [first << k for k in range(size.bit_length())]
    receivers = with_ranks([place + step for step in steps if place + step < size])
    if place == 0:
        return _exchange([nothing] * size, receivers, group, operation, tensor.nbytes)
    senders = with_ranks([place - (first >> 1)])
    pending = _exchange(senders, [nothing] * size, group, operation, tensor.nbytes)
    pending.then(
        lambda: _exchange([nothing] * size, receivers, group, operation, tensor.nbytes).wait()
    )
    return pending


def broadcast_(tensor: torch.Tensor, group: ShardGroup, operation: Operation) -> torch.Tensor:
    """Broadcast from the group's first rank, in place. Collective; blocks the host on CPU."""
    broadcast(tensor, group, operation).wait()
    return tensor


def broadcast_from_first(
    tensor: torch.Tensor, groups: Sequence[ShardGroup], name: Callable[[ShardGroup], Operation]
) -> torch.Tensor:
    """Broadcast from the first rank of all, one group after the other, in place.

    Collective over each group; blocks the host on CPU.

    Args:
        groups: inner first, as in `Placement.groups`; together they connect all ranks.
        name: returns the operation for a group.
    """
    # Outer first: afterwards the first rank of every inner group has the value.
    for group in reversed(groups):
        broadcast_(tensor, group, name(group))
    return tensor


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
        has_work = group.backend not in _ON_CURRENT_STREAM
        pending = _start(
            operation,
            given,
            group,
            lambda: dist.all_to_all_single(
                received, given, group=group.process_group, async_op=has_work
            ),
        )
        return list(received.chunk(group.size)), pending
    num_steps = _steps_under_way(group.size)
    return _exchange_in_place(own, group, operation, num_steps)


def _steps_under_way(size: int) -> int:
    """Parts of memory that a reduction gets beside its input, in a group of `size`."""
    return min(size - 1, max(2, size // 2))


def _exchange_in_place(
    own: Sequence[torch.Tensor], group: ShardGroup, operation: Operation, num_steps: int
) -> tuple[list[torch.Tensor], Pending]:
    """Send own[i] to rank i; return the part from each rank, and the handle.

    See Note [Parts arrive where others have left].
    """
    rank, size = group.rank, group.size
    parts = [*own]
    for step in range(1, size):
        parts[rank - step] = (
            torch.empty_like(own[rank])
            if step <= num_steps
            else own[(rank + step - num_steps) % size]
        )
    return parts, _exchange(parts, own, group, operation, num_steps=num_steps)


def _exchange(
    incoming: Sequence[torch.Tensor],
    outgoing: Sequence[torch.Tensor],
    group: ShardGroup,
    operation: Operation,
    nbytes: int | None = None,
    num_steps: int | None = None,
) -> Pending:
    """Exchange one tensor with every other rank, point to point; entry i belongs to rank i.

    Args:
        nbytes: is compared between ranks; None: the size of each message, if all have the same.
        num_steps: what is received in a step may go where what was sent so many steps before lay,
            and is posted after that; None: all is posted at once. If given, no tensor is empty, or
            all are.
    """
    pending = Pending(operation, group, outgoing[0].nbytes if nbytes is None else nbytes)
    process_group = group.process_group
    calls: list[functools.partial[dist.Work]] = []
    later: list[tuple[int, functools.partial[dist.Work]]] = []
    peers, receives = [], []
    late_peers: list[int] = []
    sends: list[int] = []
    """Place in `calls` of the send of each step."""
    for step in range(1, group.size):
        # Staggered, so that not every rank starts with rank 0. The send is posted before the
        # receive: a 4 MB message between two ranks of one machine then takes 2.0 to 2.4 ms instead
        # of 3.7 to 3.9 ms (benchmarks/bench_collectives.py).
        for peer, tensors, method in (
            ((group.rank + step) % group.size, outgoing, process_group.send),
            ((group.rank - step) % group.size, incoming, process_group.recv),
        ):
            tensor = tensors[peer]
            if not tensor.numel():
                continue
            call = functools.partial(method, [tensor], peer, operation.tag(tensor.nbytes))
            if tensors is incoming and num_steps is not None and step > num_steps:
                later.append((sends[step - num_steps - 1], call))
                late_peers.append(peer)
                continue
            if tensors is outgoing:
                sends.append(len(calls))
            calls.append(call)
            peers.append(peer)
            receives.append(tensors is incoming)
    peers += late_peers
    receives += [True] * len(late_peers)
    recovery = None if operation.lookout is None else operation.lookout.recovery
    if recovery is None:
        pending.post(calls, peers, receives, incoming, outgoing, later)
        return pending
    with recovery.lock:
        recovery.begin(pending)
        pending.post(calls, peers, receives, incoming, outgoing, later)
    return pending


def messages_carry_names(group: ShardGroup, device: torch.device) -> bool:
    """See Note [A message carries its name]; on other backends a `Watchdog` compares ranks."""
    return group.backend == "gloo" and device.type == "cpu"


def _start(
    operation: Operation,
    tensor: torch.Tensor,
    group: ShardGroup,
    issue: Callable[[], dist.Work | None],
) -> Pending:
    """Issue one of the backend's own collectives on `tensor`, which the watchdog then watches.

    Raises:
        CollectiveError: as `Pending.start`.
    """
    pending = Pending(operation, group, tensor.nbytes)
    if operation.watchdog is not None:
        operation.watchdog.watch(pending)
    pending.start(issue)
    return pending


def _issue_all_gather(
    full: torch.Tensor, shard: torch.Tensor, group: ShardGroup
) -> dist.Work | None:
    if full.dtype not in _SENT_BY_ALL:
        full, shard = full.view(torch.uint8), shard.view(torch.uint8)
    options = AllgatherOptions()
    options.asyncOp = group.backend not in _ON_CURRENT_STREAM
    return getattr(group.process_group, _ALL_GATHER)(full, shard, options)


def _issue_reduce_scatter(
    summed: torch.Tensor, chunks: torch.Tensor, op: dist.ReduceOp.RedOpType, group: ShardGroup
) -> dist.Work | None:
    # Backends have no complex dtypes; torch.distributed's own functions do this as well.
    if chunks.is_complex():
        summed, chunks = torch.view_as_real(summed), torch.view_as_real(chunks)
    options = ReduceScatterOptions()
    options.reduceOp = dist.ReduceOp(op)
    options.asyncOp = group.backend not in _ON_CURRENT_STREAM
    return getattr(group.process_group, _REDUCE_SCATTER)(summed, chunks, options)


def _scale(tensor: torch.Tensor, scale: float) -> None:
    if scale != 1.0:
        tensor.mul_(scale)
