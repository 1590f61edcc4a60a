"""What all ranks agree on before a step, and the exchanges of a step.

    gradients to owners    bucket 1   bucket 2   bucket 3
    the given optimizer's step, once                       on all whole tensors of the rank
    values from owners                                     bucket 1   bucket 2   bucket 3

One bucket is packed while the one before travels. All ranks issue the collectives in the same
order. Packing and unpacking run on the compute stream, and only the all-to-all on the unshard
stream: all buffers belong to compute, which has waited for the all-to-all before it frees them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import torch
import torch.distributed as dist

from layerzero.comm.exchanges import all_to_all, gather_small
from layerzero.comm.pending import Operation
from layerzero.comm.streams import Waitable
from layerzero.flat.placement import ShardGroup
from layerzero.optim.whole_tensor.owners import Member, OwnerGroup
from layerzero.optim.whole_tensor.plan import Bucket, Move, make_buckets
from layerzero.step.operations import remembers_failure
from layerzero.step.root import RootState

_PRESENT, _WRITTEN = 1, 2
Buckets = list[tuple[OwnerGroup, Bucket]]
Verb = Literal["gradients to owners", "values to owners", "values from owners"]


@remembers_failure
def agree(
    root: RootState, members: Sequence[Member], written: Sequence[bool]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Numbers of the members with a gradient, and of those whose shards were written on any rank
    since the last step. Collective; waits for no device."""
    flags = [
        _PRESENT * (member.parameter.grad is not None) + _WRITTEN * changed
        for member, changed in zip(members, written, strict=True)
    ]
    for owners, numbers in _by_owners(members, range(len(members))).items():
        group = owners.host_group
        if group.size == 1:
            continue
        name = root.operations.next if group is owners.group else root.operations.next_on_host
        operation = name("optimizer flags", "the optimizer", group)
        rows = _exchange_on_host([flags[n] for n in numbers], group, operation)
        for number, column in zip(numbers, zip(*rows, strict=True), strict=True):
            pairs = zip(group.ranks, column, strict=True)
            with_gradient = [rank for rank, flag in pairs if flag & _PRESENT]
            if 0 < len(with_gradient) < group.size:
                raise RuntimeError(
                    f"WholeTensorOptimizer: {members[number].fqn} has a gradient on "
                    f"{len(with_gradient)} of {group.size} ranks only, {with_gradient}; set .grad "
                    "to None on all ranks or none"
                )
            flags[number] = max(column)
    return (
        tuple(n for n, flag in enumerate(flags) if flag & _PRESENT),
        tuple(n for n, flag in enumerate(flags) if flag & _WRITTEN),
    )


def _exchange_on_host(
    own: Sequence[int], group: ShardGroup, operation: Operation
) -> list[list[int]]:
    """Gather every rank's numbers, each below 256, over a group that serves the CPU: no device is
    waited for. Collective; blocks the host."""
    values = torch.tensor(own, dtype=torch.uint8, device="cpu")
    if group.backend == "gloo":
        return gather_small(values, group, operation).tolist()
    table = torch.tensor([list(own)] * group.size, dtype=torch.uint8, device="cpu")
    dist.all_gather_into_tensor(table.view(-1), values, group=group.process_group)
    return table.tolist()


def buckets_of(members: Sequence[Member], numbers: Iterable[int], limit: int) -> Buckets:
    """Buckets of the members with these numbers, one group of ranks after the other."""
    return [
        (owners, bucket)
        for owners, own in _by_owners(members, numbers).items()
        for bucket in make_buckets(
            [(n, members[n].whole) for n in own], owners.group.rank, owners.group.size, limit
        )
    ]


def _by_owners(members: Sequence[Member], numbers: Iterable[int]) -> dict[OwnerGroup, list[int]]:
    found: dict[OwnerGroup, list[int]] = {}
    for number in numbers:
        found.setdefault(members[number].owners, []).append(number)
    return found


@remembers_failure
def exchange_all(root: RootState, members: Sequence[Member], buckets: Buckets, verb: Verb) -> None:
    """Send gradients or values of the members between shards and owners. Collective.

    Orders compute after it; on CPU, blocks the host.
    """
    finish: Callable[[], None] | None = None
    for owners, bucket in buckets:
        begun = _begin(root, members, owners, bucket, verb)
        if finish is not None:
            finish()
        finish = begun
    if finish is not None:
        finish()


def _begin(
    root: RootState, members: Sequence[Member], owners: OwnerGroup, bucket: Bucket, verb: Verb
) -> Callable[[], None]:
    """Pack and send a bucket, and copy what stays on this rank. Collective over `owners`.

    Does not block the host, unless shards are offloaded. Returns a function that writes what
    has arrived.
    """
    of_gradients, to_owners = verb == "gradients to owners", verb != "values from owners"
    staged = {
        number: member.staged(of_gradients)
        for number in bucket.tensors
        if (member := members[number]).tensor is not None
    }

    def in_shard(move: Move) -> torch.Tensor:
        return members[move.tensor].piece(of_gradients)

    def in_whole(move: Move) -> torch.Tensor:
        return staged[move.tensor].elements(move)

    transfer, read, write = bucket.to_owners, in_shard, in_whole
    if not to_owners:
        transfer, read, write = bucket.from_owners, in_whole, in_shard
        for each in staged.values():
            each.load()
    for move in transfer.own:
        source, target = read(move), write(move)
        if source.data_ptr() != target.data_ptr():
            target.copy_(source)
    device = root.device
    work: Waitable | None = None
    received = torch.empty(sum(transfer.received), dtype=torch.uint8, device=device)
    sent_keepalive = torch.empty(sum(transfer.sent), dtype=torch.uint8, device=device)
    if transfer.nbytes:
        sources = [_bytes_of(read(move)) for move in transfer.outgoing]
        if sources and sources[0].device == device:
            torch.cat(sources, out=sent_keepalive)
        elif sources:
            sent_keepalive.copy_(torch.cat(sources))
        operation = root.operations.next(verb, "the optimizer", owners.group)
        packed = root.streams.record_compute_event()
        with root.streams.unshard as stream:
            stream.wait(packed)
            sizes = transfer.received, sent_keepalive, transfer.sent
            pending = all_to_all(received, *sizes, owners.group, operation, transfer.nbytes)
            work = stream.enqueue_wait(pending)

    def finish() -> None:
        nonlocal sent_keepalive
        if work is not None:
            work.wait()
            del sent_keepalive
            parts = received.split_with_sizes([move.nbytes for move in transfer.incoming])
            for move, part in zip(transfer.incoming, parts, strict=True):
                _bytes_of(write(move)).copy_(part)
        if to_owners:
            for each in staged.values():
                each.store()

    return finish


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)
