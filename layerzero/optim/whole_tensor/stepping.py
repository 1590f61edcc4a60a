"""One step: what all ranks agree on before it, and the pipeline of its buckets.

    bucket 1   gather |compute| return
    bucket 2           gather |compute| return       gather: gradients travel to owners
    bucket 3                   gather |compute| ...  return: values travel to shards

The gradients of one bucket travel while another is computed, and so do its values. All ranks issue
the collectives in the same order. Packing and unpacking run on the compute stream, and only the
all-to-all on the unshard stream: all buffers belong to compute, which has waited for the all-to-all
before it frees them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from layerzero.comm.collectives import all_to_all, exchange_on_host
from layerzero.comm.streams import Waitable
from layerzero.flat.groups import ShardGroup
from layerzero.optim.whole_tensor.inner import Step
from layerzero.optim.whole_tensor.owners import Member, OwnerGroup, Staged
from layerzero.optim.whole_tensor.plan import Bucket, Move, Transfer, make_buckets
from layerzero.step.operations import remembers_failure
from layerzero.step.root import RootState

_PRESENT, _WRITTEN = 1, 2
_View = Callable[[Move], torch.Tensor]
"""Returns the elements of a move: a 1-D contiguous tensor of their dtype."""
Buckets = list[tuple[OwnerGroup, Bucket]]


class Agreed(NamedTuple):
    """What all ranks know before a step. Numbers count members."""

    present: tuple[int, ...]
    """Those with a gradient."""
    written: tuple[int, ...]
    """Those whose shards were written on any rank since the last step."""


@remembers_failure
def agree(root: RootState, members: Sequence[Member], written: Sequence[bool]) -> Agreed:
    """Exchange which members have a gradient, and which shards were written. Collective.

    Waits for no device.

    Raises:
        RuntimeError: on every rank of a group, if only some of its ranks have a gradient.
    """
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
        rows = exchange_on_host([flags[n] for n in numbers], group, operation)
        for number, column in zip(numbers, zip(*rows, strict=True), strict=True):
            with_gradient = [rank for rank, flag in enumerate(column) if flag & _PRESENT]
            if 0 < len(with_gradient) < group.size:
                raise RuntimeError(
                    f"WholeTensorOptimizer: {members[number].fqn} has a gradient on ranks "
                    f"{with_gradient} of {group.size} only; set .grad to None on all ranks or none"
                )
            flags[number] = max(column)
    return Agreed(
        tuple(n for n, flag in enumerate(flags) if flag & _PRESENT),
        tuple(n for n, flag in enumerate(flags) if flag & _WRITTEN),
    )


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
def fetch_values(root: RootState, members: Sequence[Member], buckets: Buckets) -> None:
    """Bring the values of shards to the owners. Collective."""
    for each in buckets:
        _to_owners(root, members, *each, of_values=True)()


@remembers_failure
def run_step(
    root: RootState, members: Sequence[Member], buckets: Buckets, step: Step, is_bucketed: bool
) -> None:
    """Gather gradients, step, and return values, bucket by bucket. Collective.

    Args:
        step: steps whole tensors of this rank; it keeps errors, so that the exchanges go on.
        is_bucketed: else `step` is called once for all tensors, after all gradients.
    """
    calls = [[each] for each in buckets] if is_bucketed else [buckets]
    coming = _all_to_owners(root, members, calls[0]) if calls else []
    returning: list[Exchange] = []
    for place, call in enumerate(calls):
        arrived, coming = coming, []
        if place + 1 < len(calls):
            coming = _all_to_owners(root, members, calls[place + 1])
        for finish in arrived:
            finish()
        tensors = [members[number].tensor for _, bucket in call for number in bucket.tensors]
        step.call([tensor for tensor in tensors if tensor is not None])
        for exchange in returning:
            exchange.finish()
        returning = [_from_owners(root, members, *each) for each in call]
    for exchange in returning:
        exchange.finish()


def _all_to_owners(
    root: RootState, members: Sequence[Member], buckets: Buckets
) -> list[Callable[[], None]]:
    return [_to_owners(root, members, *each) for each in buckets]


def _to_owners(
    root: RootState,
    members: Sequence[Member],
    owners: OwnerGroup,
    bucket: Bucket,
    of_values: bool = False,
) -> Callable[[], None]:
    """Start sending gradients, or values, of one bucket to the owners. Collective.

    Returns:
        Orders compute after it; on CPU, blocks the host.
    """
    staged: dict[int, Staged] = {}
    for number in bucket.tensors:
        member = members[number]
        own = member.staged_values() if of_values else member.staged_gradient()
        if own is not None:
            staged[number] = own

    def read(move: Move) -> torch.Tensor:
        member = members[move.tensor]
        return member.parameter.detach().view(-1) if of_values else member.gradient()

    def write(move: Move) -> torch.Tensor:
        return staged[move.tensor].elements(move)

    verb = "values to owners" if of_values else "gradients to owners"
    exchange = Exchange(root, owners.group, bucket.to_owners, verb, read, write)

    def finish() -> None:
        exchange.finish()
        for each in staged.values():
            each.store()

    return finish


def _from_owners(
    root: RootState, members: Sequence[Member], owners: OwnerGroup, bucket: Bucket
) -> Exchange:
    """Start sending the values of one bucket to all shards. Collective."""
    staged: dict[int, Staged] = {}
    for number in bucket.tensors:
        own = members[number].staged_values()
        if own is not None:
            own.load()
            staged[number] = own
    return Exchange(
        root,
        owners.group,
        bucket.from_owners,
        "values from owners",
        lambda move: staged[move.tensor].elements(move),
        lambda move: members[move.tensor].parameter.detach().view(-1),
    )


class Exchange:
    """One exchange in flight."""

    def __init__(
        self,
        root: RootState,
        group: ShardGroup,
        transfer: Transfer,
        verb: str,
        read: _View,
        write: _View,
    ) -> None:
        """Pack and send a bucket, and copy what stays on this rank. Collective over the group.

        Does not block the host, unless shards are offloaded.

        Args:
            verb: name of the collective.
            read: where the elements of a move come from; not called later.
            write: where they go; for `transfer.own` called now, for the others by `finish`.
        """
        for move in transfer.own:
            source, target = read(move), write(move)
            if source.data_ptr() != target.data_ptr():
                target.copy_(source)
        self._transfer, self._write = transfer, write
        self._work: Waitable | None = None
        if not transfer.nbytes:
            return
        device = root.device
        self._received = torch.empty(sum(transfer.received), dtype=torch.uint8, device=device)
        sent = torch.empty(sum(transfer.sent), dtype=torch.uint8, device=device)
        sources = [_bytes_of(read(move)) for move in transfer.outgoing]
        if sources and sources[0].device == device:
            torch.cat(sources, out=sent)
        elif sources:
            sent.copy_(torch.cat(sources))
        operation = root.operations.next(verb, "the optimizer", group)
        packed = root.streams.record_compute_event()
        with root.streams.unshard as stream:
            stream.wait(packed)
            sizes = transfer.received, sent, transfer.sent
            pending = all_to_all(self._received, *sizes, group, operation, transfer.nbytes)
            self._work = stream.enqueue_wait(pending)
        self._sent_keepalive: torch.Tensor | None = sent

    def finish(self) -> None:
        """Write what has arrived. Orders compute after it; blocks the host on CPU.

        Raises:
            CollectiveError: a rank did not take part.
        """
        if self._work is None:
            return
        self._work.wait()
        self._sent_keepalive = None
        moves = self._transfer.incoming
        parts = self._received.split_with_sizes([move.nbytes for move in moves])
        for move, part in zip(moves, parts, strict=True):
            _bytes_of(self._write(move)).copy_(part)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)
