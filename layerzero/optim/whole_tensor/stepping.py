"""One step: what all ranks agree on before it, and the pipeline of its buckets.

    bucket 1   gather |compute| return
    bucket 2           gather |compute| return       gather: gradients travel to owners
    bucket 3                   gather |compute| ...  return: values travel to shards

The gradients of one bucket travel while another is computed, and so do its values. All ranks issue
the collectives in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from layerzero.optim.whole_tensor.exchange import Exchange, start_exchange
from layerzero.optim.whole_tensor.inner import Step
from layerzero.optim.whole_tensor.members import Member, Staged
from layerzero.optim.whole_tensor.party import Party
from layerzero.optim.whole_tensor.plan import Bucket, Span, make_buckets
from layerzero.step.operations import remembers_failure
from layerzero.step.root import RootState

_PRESENT, _WRITTEN = 1, 2


class PartyBucket(NamedTuple):
    """A bucket of one party's members."""

    party: Party
    bucket: Bucket


class Agreed(NamedTuple):
    """What all ranks know before a step. Numbers count members."""

    present: tuple[int, ...]
    """Those with a gradient."""
    written: tuple[int, ...]
    """Those whose shards were written on any rank since the last step."""


@remembers_failure
def agree(
    root: RootState, parties: Sequence[Party], members: Sequence[Member], written: Sequence[bool]
) -> Agreed:
    """Exchange which members have a gradient, and which shards were written. Collective.

    Raises:
        RuntimeError: on every rank of a party, if only some of its ranks have a gradient.
    """
    flags = [
        _PRESENT * (member.parameter.grad is not None) + _WRITTEN * changed
        for member, changed in zip(members, written, strict=True)
    ]
    anywhere = list(flags)
    for party in parties:
        numbers = [n for n, member in enumerate(members) if member.party is party]
        if party.size == 1 or not numbers:
            continue
        rows = party.gather_on_host(root, "optimizer flags", [flags[n] for n in numbers])
        for number, column in zip(numbers, zip(*rows, strict=True), strict=True):
            with_gradient = [rank for rank, flag in enumerate(column) if flag & _PRESENT]
            if 0 < len(with_gradient) < party.size:
                raise RuntimeError(
                    f"WholeTensorOptimizer: {members[number].fqn} has a gradient on ranks "
                    f"{with_gradient} of {party.size} only; set .grad to None on all ranks or none"
                )
            anywhere[number] = max(column, key=lambda flag: flag & _WRITTEN)
    return Agreed(
        tuple(n for n, flag in enumerate(anywhere) if flag & _PRESENT),
        tuple(n for n, flag in enumerate(anywhere) if flag & _WRITTEN),
    )


def make_party_buckets(
    members: Sequence[Member], numbers: Sequence[int], limit: int
) -> list[PartyBucket]:
    """Buckets of the members with these numbers, party by party."""
    by_party: dict[Party, list[int]] = {}
    for number in numbers:
        by_party.setdefault(members[number].party, []).append(number)
    return [
        PartyBucket(party, bucket)
        for party, own in by_party.items()
        for bucket in make_buckets(
            [(number, members[number].whole) for number in own], party.rank, party.size, limit
        )
    ]


@remembers_failure
def fetch_values(
    root: RootState, members: Sequence[Member], buckets: Sequence[PartyBucket]
) -> None:
    """Bring the values of shards to the owners. Collective."""
    for each in buckets:
        _Gather(root, members, each, of_values=True).finish()


@remembers_failure
def run_step(
    root: RootState, members: Sequence[Member], buckets: Sequence[PartyBucket], step: Step
) -> None:
    """Gather gradients, step, and return values, bucket by bucket. Collective.

    Args:
        step: steps whole tensors of this rank; it keeps errors, so that the exchanges go on.
    """
    coming = _Gather(root, members, buckets[0]) if buckets else None
    returning: Exchange | None = None
    for place, each in enumerate(buckets):
        assert coming is not None
        arrived, coming = coming, None
        if place + 1 < len(buckets):
            coming = _Gather(root, members, buckets[place + 1])
        arrived.finish()
        step.call(_owned(members, each))
        if returning is not None:
            returning.finish()
        returning = _return(root, members, each)
    if returning is not None:
        returning.finish()


@remembers_failure
def run_step_at_once(
    root: RootState, members: Sequence[Member], buckets: Sequence[PartyBucket], step: Step
) -> None:
    """`run_step` with one call for all tensors, after all gradients. Collective."""
    for each in buckets:
        _Gather(root, members, each).finish()
    step.call([tensor for each in buckets for tensor in _owned(members, each)])
    for each in buckets:
        _return(root, members, each).finish()


def _owned(members: Sequence[Member], each: PartyBucket) -> list[nn.Parameter]:
    tensors = (members[number].tensor for number in each.bucket.tensors)
    return [tensor for tensor in tensors if tensor is not None]


class _Gather:
    """Gradients, or values, of one bucket on their way to the owners."""

    def __init__(
        self,
        root: RootState,
        members: Sequence[Member],
        each: PartyBucket,
        of_values: bool = False,
    ) -> None:
        """Start it. Collective."""
        staged: dict[int, Staged] = {}
        for number in each.bucket.tensors:
            member = members[number]
            own = member.staged_values() if of_values else member.staged_gradient()
            if own is not None:
                staged[number] = own
        self._staged = staged.values()

        def read(span: Span) -> torch.Tensor:
            member = members[span.tensor]
            return member.value(span) if of_values else member.gradient(span)

        verb = "values to owners" if of_values else "gradients to owners"
        self._exchange = start_exchange(
            root,
            each.party.group,
            each.bucket.to_owners,
            each.bucket.nbytes,
            verb,
            read,
            # Without a reference to this object: a cycle would keep the memory.
            lambda span: staged[span.tensor].elements(span),
        )

    def finish(self) -> None:
        """Order compute after it; on CPU, block the host."""
        self._exchange.finish()
        for staged in self._staged:
            staged.store()


def _return(root: RootState, members: Sequence[Member], each: PartyBucket) -> Exchange:
    """Start sending the values of one bucket to all shards. Collective."""
    found: dict[int, Staged] = {}
    for number in each.bucket.tensors:
        staged = members[number].staged_values()
        if staged is not None:
            staged.load()
            found[number] = staged
    return start_exchange(
        root,
        each.party.group,
        each.bucket.from_owners,
        each.bucket.returned_nbytes,
        "values from owners",
        lambda span: found[span.tensor].elements(span),
        lambda span: members[span.tensor].value(span),
    )
