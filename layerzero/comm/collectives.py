"""The collectives of the engine: all-gather, reduce-scatter and small exchanges on 1-D tensors.

Each verb knows which call serves a backend best. On gloo, where every rank pair has its own
connection, the point-to-point calls move the same bytes straight between the final places, and
the sum of a reduction is ours: benchmarks/bench_collectives.py measures both against gloo's own.

Note [A message carries its name]
    Point-to-point messages match by tag, and the tag is a hash of the operation, the unit, the
    size, the operation's number in this model, and the model's number on the group. Ranks that
    issue different operations never exchange bytes: they wait, a `Lookout` finds out that they
    parted, and the error says who waits for what. Without this, two gathers of equal size in
    swapped order would silently mix the weights of two units, and of unequal size would abort the
    process inside gloo.

Note [Rank order]
    Sums are taken in rank order, in float32 at least, so they do not depend on who arrives first.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions, ReduceScatterOptions

from layerzero.comm.diagnosis import CollectiveError, diagnose
from layerzero.comm.lookout import Lookout
from layerzero.comm.streams import Event
from layerzero.comm.watchdog import Watchdog
from layerzero.core.groups import ShardGroup
from layerzero.ops import ordered_sum_

_AVERAGING_BACKENDS = ("nccl", "fake")
# Methods of the process group, since torch 2.13 under the first name. What the functions of
# torch.distributed put around them (checks, complex views, coalescing) takes longer than the rest
# of what the host does for a gather.
_HAS_SINGLE = hasattr(dist.ProcessGroup, "all_gather_single")
_ALL_GATHER = "all_gather_single" if _HAS_SINGLE else "_allgather_base"
_REDUCE_SCATTER = "reduce_scatter_single" if _HAS_SINGLE else "_reduce_scatter_base"


class Operation(NamedTuple):
    """Identifies one collective: verb, unit, sequence number within this model."""

    verb: str
    unit: str
    number: int
    watchdog: Watchdog | None = None
    """Where messages carry no name."""
    lookout: Lookout | None = None
    """Where they do."""
    model: int = 0
    """Number of the model on the group; 0: of no model, or on a group that it was not made for."""

    def __str__(self) -> str:
        return f"{self.verb} of {self.unit} (#{self.number})"

    def tag(self, nbytes: int) -> int:
        """See Note [A message carries its name]; non-negative and apart from small user tags."""
        name = f"{self.verb}/{self.unit}/{self.number}/{nbytes}/{self.model}"
        return zlib.crc32(name.encode()) & 0x3FFFFFFF | 0x40000000


class Pending:
    """A collective under way."""

    peer: int
    """Rank in the group whose message is waited for now; -1: all, or nobody yet."""
    num_looks: int
    """How often a lookout has met it."""

    def __init__(self, operation: Operation, group: ShardGroup, nbytes: int = 0) -> None:
        """`nbytes` of the whole tensor, or of a message that carries a name: for comparisons."""
        self.operation = operation
        self.group = group
        self.nbytes = nbytes
        self.peer = -1
        self.num_looks = 0
        self.works: Sequence[tuple[dist.Work, int]] | None = None
        """Each handle with the peer's rank in the group, or -1: all; None until issued."""
        self._finish: Callable[[], object] | None = None
        watchdog = operation.watchdog
        self._reached_event: Event = None if watchdog is None else watchdog.record_event()
        self._done_event: Event = None

    @property
    def number(self) -> int:
        return self.operation.number

    @property
    def name(self) -> str:
        return str(self.operation)

    @property
    def is_reached(self) -> bool:
        """Whether this rank has come as far, and can only wait for others."""
        return self._reached_event is None or bool(self._reached_event.query())

    @property
    def is_done(self) -> bool:
        """Whether the device, or the backend on CPU, is past the collective."""
        if self._done_event is not None:
            return bool(self._done_event.query())
        works = self.works
        return works is not None and all(work.is_completed() for work, _ in works)

    def then(self, finish: Callable[[], object]) -> None:
        """Run `finish` once the data is there, in the first `wait`."""
        self._finish = finish

    def wait(self) -> None:
        """Return when the result is there and no peer reads this rank's buffers any more.

        On a device with streams: when what comes next is ordered after that. Both, because gloo
        forgets a message whose handle is gone: a rank that has all it needs and drops the model,
        or ends, would leave its peers waiting.

        Raises:
            CollectiveError: a peer is dead, or did not take part within the timeout.
        """
        self._await()
        if self.operation.watchdog is not None:
            self._done_event = self.operation.watchdog.record_event()
        self.works = ()
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()

    def _await(self) -> None:
        timed = self.group.backend == "gloo"
        lookout = self.operation.lookout
        if lookout is not None and self.works:
            lookout.begin_wait(self)
        try:
            for work, peer in self.works or ():
                self.peer = peer
                if timed:
                    work.wait(self.group.timeout)
                else:
                    work.wait()
        except RuntimeError as error:
            raise self.diagnose(error) from error
        finally:
            if lookout is not None:
                lookout.waiting.discard(self)

    def diagnose(self, error: RuntimeError) -> CollectiveError:
        """Make the error for a failed message of `peer`. Blocks for some seconds."""
        lookout = self.operation.lookout
        ask = None if lookout is None else lookout.ask
        return diagnose(str(self.operation), self.group, self.peer, error, ask)


def all_gather(
    full: torch.Tensor, shard: torch.Tensor, group: ShardGroup, operation: Operation
) -> Pending:
    """Gather every rank's shard into `full`. Collective over the group; does not block the host.

    Args:
        full: [group_size * shard_numel]; written.
        shard: [shard_numel] of the same dtype; may be this rank's slice of `full`. Must not
            change until the returned handle was waited for.
    """
    numel = shard.numel()
    if not messages_carry_names(group, shard.device):
        return _start(operation, full, group, lambda: _issue_all_gather(full, shard, group))
    rank = group.rank
    own = full[rank * numel : (rank + 1) * numel]
    if own.data_ptr() != shard.data_ptr():
        own.copy_(shard)
    slices = [full[peer * numel : (peer + 1) * numel] for peer in range(group.size)]
    return _exchange(slices, [shard] * group.size, group, operation)


def reduce_scatter(
    chunks: torch.Tensor,
    group: ShardGroup,
    operation: Operation,
    scale: float = 1.0,
    deterministic: bool = False,
    order: Sequence[int] | None = None,
) -> tuple[torch.Tensor, Pending]:
    """Sum chunk r of every rank's `chunks` on rank r. Collective; does not block the host.

    Args:
        chunks: [group_size * chunk_numel] in the dtype that travels; must not change until the
            handle was waited for.
        scale: factor on the sum (1 / group_size makes a mean).
        deterministic: sum in rank order in float32 on every backend; gloo always does.
        order: rank r is given chunk order[r] instead of r; deterministic sums only.

    Returns:
        ([chunk_numel] scaled sum, valid once the handle was waited for, and the handle). The sum
        is float32 (float64 for float64) where the engine sums, else in the dtype that travels.
    """
    chunk_numel = chunks.numel() // group.size
    if not (messages_carry_names(group, chunks.device) or deterministic):
        op = dist.ReduceOp.SUM
        if scale == 1.0 / group.size and group.backend in _AVERAGING_BACKENDS:
            op, scale = dist.ReduceOp.AVG, 1.0
        elif scale != 1.0 and chunks.dtype == torch.float16:
            # The range of float16 is the narrowest: scale before the sum can overflow.
            chunks.mul_(scale)
            scale = 1.0
        summed = chunks.new_empty(chunk_numel)
        pending = _start(
            operation, chunks, group, lambda: _issue_reduce_scatter(summed, chunks, op, group)
        )
        if scale != 1.0:
            pending.then(lambda: _scale(summed, scale))
        return summed, pending
    dtype = torch.promote_types(chunks.dtype, torch.float32)
    parts, pending = _all_to_all(chunks, group, operation, order)
    if dtype == chunks.dtype and messages_carry_names(group, chunks.device) and group.size > 1:
        # The sum may take the place of the first part that came from elsewhere.
        summed = parts[0 if group.rank else 1]
    else:
        summed = torch.empty(chunk_numel, dtype=dtype, device=chunks.device)
    pending.then(functools.partial(ordered_sum_, summed, parts, scale))
    return summed, pending


def flags_tensor(flags: Sequence[bool], device: torch.device) -> torch.Tensor:
    """[len(flags)] uint8 on `device`, made without waiting for it."""
    if all(flags):
        return torch.ones(len(flags), dtype=torch.uint8, device=device)
    return torch.tensor(flags, dtype=torch.uint8).to(device, non_blocking=True)


def gather_flags(
    flags: torch.Tensor, group: ShardGroup, operation: Operation
) -> tuple[torch.Tensor, Pending]:
    """Gather [N] uint8 from every rank. Collective over the group; does not block the host.

    Returns:
        ([group_size, N] uint8, valid once the handle was waited for, and the handle).
    """
    table = flags.new_empty(group.size, flags.numel())
    return table, all_gather(table.view(-1), flags, group, operation)


def gather_small(tensor: torch.Tensor, group: ShardGroup, operation: Operation) -> torch.Tensor:
    """Every rank's values: [group_size, *shape], in rank order. Collective; blocks on CPU."""
    values = tensor.new_empty(group.size, *tensor.shape)
    all_gather(values.view(-1), tensor.reshape(-1), group, operation).wait()
    return values


def broadcast(
    tensor: torch.Tensor, group: ShardGroup, operation: Operation, source: int = 0
) -> Pending:
    """Copy a tensor of the group's rank `source` to all, in place. Collective; does not block."""
    global_rank, process_group = group.ranks[source], group.process_group
    return _start(
        operation,
        tensor,
        group,
        lambda: dist.broadcast(tensor, global_rank, group=process_group, async_op=True),
    )


def broadcast_(tensor: torch.Tensor, group: ShardGroup, operation: Operation) -> torch.Tensor:
    """Copy a tensor of the group's first rank to all, in place. Collective; blocks on CPU."""
    broadcast(tensor, group, operation).wait()
    return tensor


def broadcast_from_first(
    tensor: torch.Tensor, groups: Sequence[ShardGroup], name: Callable[[ShardGroup], Operation]
) -> torch.Tensor:
    """Copy what the first of all ranks along `groups` has to all, in place. Collective over each of
    them; blocks on CPU.

    Args:
        groups: inner first, as `Placement.groups`; together they lead from one rank to all.
        name: the operation, for each group.
    """
    # Outer first: then the first rank of every inner group has it.
    for group in reversed(groups):
        broadcast_(tensor, group, name(group))
    return tensor


def _all_to_all(
    chunks: torch.Tensor, group: ShardGroup, operation: Operation, order: Sequence[int] | None
) -> tuple[list[torch.Tensor], Pending]:
    """Send chunk order[i] to rank i; returns what came from each rank, and the handle."""
    own = list(chunks.chunk(group.size))
    if order is not None:
        own = [own[place] for place in order]
    if not messages_carry_names(group, chunks.device):
        given = chunks if order is None else torch.cat(own)
        received = torch.empty_like(given)
        pending = _start(
            operation,
            given,
            group,
            lambda: dist.all_to_all_single(
                received, given, group=group.process_group, async_op=True
            ),
        )
        return list(received.chunk(group.size)), pending
    parts = [
        chunk if rank == group.rank else torch.empty_like(chunk) for rank, chunk in enumerate(own)
    ]
    return parts, _exchange(parts, own, group, operation)


def _exchange(
    incoming: Sequence[torch.Tensor],
    outgoing: Sequence[torch.Tensor],
    group: ShardGroup,
    operation: Operation,
) -> Pending:
    """Swap one tensor with each other rank, point to point; entry i belongs to rank i."""
    process_group = group.process_group
    receives, sends = [], []
    pending = Pending(operation, group, outgoing[0].nbytes)
    for step in range(1, group.size):
        # Staggered, so that not every rank talks to rank 0 first. The send goes before the receive:
        # a message of 4 MB then takes 2.0 to 2.4 ms instead of 3.7 to 3.9 on two ranks of one
        # machine, measured with benchmarks/bench_collectives.py.
        source = (group.rank - step) % group.size
        target = (group.rank + step) % group.size
        try:
            pending.peer = target
            if outgoing[target].numel():
                tag = operation.tag(outgoing[target].nbytes)
                sends.append((process_group.send([outgoing[target]], target, tag), target))
            pending.peer = source
            if incoming[source].numel():
                tag = operation.tag(incoming[source].nbytes)
                receives.append((process_group.recv([incoming[source]], source, tag), source))
        except RuntimeError as error:
            raise pending.diagnose(error) from error
    pending.works = [*receives, *sends]
    return pending


def messages_carry_names(group: ShardGroup, device: torch.device) -> bool:
    """See Note [A message carries its name]; elsewhere a `Watchdog` looks on."""
    return group.backend == "gloo" and device.type == "cpu"


def _start(
    operation: Operation, tensor: torch.Tensor, group: ShardGroup, issue: Callable[[], dist.Work]
) -> Pending:
    """Issue a call of the backend's own on `tensor`; a peer may be known to be dead already."""
    pending = Pending(operation, group, tensor.nbytes)
    if operation.watchdog is not None:
        operation.watchdog.watch(pending)
    try:
        pending.works = ((issue(), -1),)
    except RuntimeError as error:
        raise pending.diagnose(error) from error
    return pending


def _issue_all_gather(full: torch.Tensor, shard: torch.Tensor, group: ShardGroup) -> dist.Work:
    if full.is_complex():
        full, shard = torch.view_as_real(full), torch.view_as_real(shard)
    options = AllgatherOptions()
    options.asyncOp = True
    return getattr(group.process_group, _ALL_GATHER)(full, shard, options)


def _issue_reduce_scatter(
    summed: torch.Tensor, chunks: torch.Tensor, op: dist.ReduceOp.RedOpType, group: ShardGroup
) -> dist.Work:
    if chunks.is_complex():
        summed, chunks = torch.view_as_real(summed), torch.view_as_real(chunks)
    options = ReduceScatterOptions()
    options.reduceOp = dist.ReduceOp(op)
    options.asyncOp = True
    return getattr(group.process_group, _REDUCE_SCATTER)(summed, chunks, options)


def _scale(tensor: torch.Tensor, scale: float) -> None:
    if scale != 1.0:
        tensor.mul_(scale)
