"""Exchanges beside a step's gathers and reductions: flags, numbers, texts, and broadcasts; the
names of models in torch's store.

Where several groups are given, they together connect all ranks that take part, as the axes of a
grid do; an exchange runs over one after the other.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from layerzero.comm.collectives import SENT_BY_ALL, all_gather
from layerzero.comm.gloo import messages
from layerzero.comm.ordered_sums import ON_CURRENT_STREAM, all_to_all_on
from layerzero.comm.pending import Operation, Pending, messages_carry_names, start
from layerzero.flat.groups import own_rank
from layerzero.flat.placement import ShardGroup
from layerzero.watch.diagnosis import run_names

MAX_NBYTES = 1000
"""Limit on the UTF-8 bytes of one text of `gather_texts`; longer texts are truncated."""
Name = Callable[[ShardGroup], Operation]
"""Returns the operation for a group."""


def gather_small(tensor: torch.Tensor, group: ShardGroup, operation: Operation) -> torch.Tensor:
    """Gather every rank's `tensor` as [group_size, *shape], in rank order.

    Collective over the group; blocks the host on CPU.
    """
    values = tensor.new_empty(group.size, *tensor.shape)
    full, own = values.view(-1), tensor.reshape(-1)
    all_gather(full, own, group, operation).wait()
    return values


def gather_along(tensor: torch.Tensor, groups: Sequence[ShardGroup], name: Name) -> torch.Tensor:
    """`gather_small` over each group: [size of the last group, ..., size of the first, *shape].

    Groups of one rank are left out, in the shape, too.
    """
    for group in groups:
        if group.size > 1:
            tensor = gather_small(tensor, group, name(group))
    return tensor


def gather_bytes(
    data: bytes, groups: Sequence[ShardGroup], name: Name, device: torch.device
) -> list[bytes]:
    """Gather every rank's bytes, of any number, in the order of `gather_along`.

    Collective over each group; blocks the host. If no rank has any, the only traffic is one integer
    a rank.
    """
    own = torch.tensor([len(data)], device=device)
    sizes = gather_along(own, groups, name).view(-1).tolist()
    longest = max(sizes)
    if not longest:
        return [data] * len(sizes)
    sent = torch.frombuffer(bytearray(data.ljust(longest)), dtype=torch.uint8).to(device)
    rows = gather_along(sent, groups, name).view(-1, longest).cpu()
    return [row[:size].numpy().tobytes() for row, size in zip(rows, sizes, strict=True)]


def gather_texts(
    text: str | None, groups: Sequence[ShardGroup], device: torch.device, what: str
) -> dict[int, str]:
    """Gather the texts of all ranks that have one, for errors and warnings: {global rank: text}, in
    rank order.

    Collective over each group; blocks the host. Too slow for every step.

    Args:
        text: this rank's text; None if it has none.
        what: the subject, which the error names if a rank does not take part.
    """
    own = b"" if text is None else f"{own_rank()} ".encode() + text.encode()[:MAX_NBYTES]
    everyone = gather_bytes(own, groups, lambda _: Operation("exchange", what, 0), device)
    texts = (each.decode(errors="replace").partition(" ") for each in everyone if each)
    return dict(sorted((int(number), text) for number, _, text in texts))


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
        return messages.exchange(incoming, outgoing, group, operation, nbytes)
    sizes = list(received_sizes), list(sent_sizes)
    return start(operation, nbytes, group, all_to_all_on(group, received, sent, *sizes))


def broadcast(
    tensor: torch.Tensor, group: ShardGroup, operation: Operation, source: int = 0
) -> Pending:
    """Broadcast from group rank `source`, in place. Collective; does not block the host."""
    if messages_carry_names(group, tensor.device):
        return messages.broadcast(tensor, group, operation, source)
    global_rank, process_group = group.ranks[source], group.process_group
    sent = tensor if tensor.dtype in SENT_BY_ALL else tensor.view(-1).view(torch.uint8)
    has_work = group.backend not in ON_CURRENT_STREAM
    return start(
        operation,
        tensor.nbytes,
        group,
        lambda: dist.broadcast(sent, global_rank, group=process_group, async_op=has_work),
    )


def broadcast_from_first(
    tensor: torch.Tensor, groups: Sequence[ShardGroup], name: Name
) -> torch.Tensor:
    """Broadcast from the first rank of all, in place. Collective over each group; blocks the host
    on CPU.

    Args:
        groups: inner first, as in `Placement.groups`.
    """
    # Outer first: afterwards the first rank of every inner group has the value.
    for group in reversed(groups):
        broadcast(tensor, group, name(group)).wait()
    return tensor


class ModelNumber(NamedTuple):
    """Identifies one model on one process group; the same on all ranks of the group."""

    run: str
    """Random name of the run. The store may outlive a run, if an elastic launcher restarts the
    ranks, and still hold its notes (diagnosis.py, watchdog.py, desync.py)."""
    number: int
    """Number of the model, counted from 1 in the order of wrapping."""

    @property
    def place(self) -> str:
        """Prefix of this model's notes in the store."""
        return f"{self.run}/{self.number}"


_numbers: WeakKeyDictionary[dist.ProcessGroup, ModelNumber] = WeakKeyDictionary()
"""Number of the last model on each group."""


def number_model(
    groups: Iterable[ShardGroup], device: torch.device
) -> dict[dist.ProcessGroup, ModelNumber]:
    """Count one more model on each of its groups. Collective over a group the first time.

    Raises:
        CollectiveError: a rank did not take part within the timeout.
    """
    several = {group.process_group: group for group in groups if group.size > 1}
    for process_group, group in several.items():
        if process_group in _numbers:
            run, number = _numbers[process_group]
        else:
            # Not from torch's generator: that would change the user's random numbers.
            own = torch.tensor([secrets.randbits(62)], device=device)
            name = Operation("exchange", "the name of this run", 0)
            run, number = f"{gather_small(own, group, name).max().item():x}", 0
            run_names[process_group] = run
        _numbers[process_group] = ModelNumber(run, number + 1)
    return {process_group: _numbers[process_group] for process_group in several}
