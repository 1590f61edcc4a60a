"""Messages between pairs of ranks on gloo, which carry the engine's collectives there.

On gloo every pair of ranks has its own connection, so messages go directly from source to
destination buffers (benchmarks/results/collectives_epyc2_202611.md: beside gloo's collectives).

Note [A message carries its name]
    Point-to-point messages match by tag. The tag is a hash of the verb, the unit, the operation's
    number in this model, the size, and the model's number on the group. Ranks that issue different
    operations therefore never exchange bytes (decision 0005): they wait, and a `DesyncDetector`
    finds that their paths differ.

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
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from layerzero.comm.pending import Operation, Pending
from layerzero.flat.placement import ShardGroup

_Call = functools.partial[dist.Work]


class Message(NamedTuple):
    """One tensor on its way to or from a peer, once `call` has posted it."""

    call: _Call
    peer: int
    """The peer's group rank."""
    receives: bool
    after: int | None = None
    """Place of the message that must be over before; None: it is posted at once."""


class Messages(Pending):
    """Handle of messages in flight."""

    _messages: Sequence[Message] = ()

    def __init__(self, operation: Operation, group: ShardGroup, nbytes: int) -> None:
        super().__init__(operation, group, nbytes)
        self._posted: list[dist.Work | None] = []
        """Works in order of posting; None for one that was waited for: never wait for it twice."""

    def post(self, messages: Sequence[Message]) -> Pending:
        """Post those of `messages` that come first, without `after`; `wait` posts the others.

        Raises:
            CollectiveError: the connection to a peer is closed.
        """
        if self.operation.detector is not None:
            self.operation.detector.in_flight.add(self)
        self._messages = messages
        try:
            # In one call from C, amid which no signal can raise: a handle that is lost would leave
            # its peer waiting, and gloo writing into memory that is freed.
            calls = [message.call for message in messages if message.after is None]
            self._posted.extend(map(_Call.__call__, calls))
        except RuntimeError as error:
            self.peer = messages[len(self._posted)].peer
            raise self.diagnose(error) from error
        return self

    def wait_for_data(self) -> None:
        super().wait_for_data()
        self._posted, self._messages = [], ()

    def _all_works(self) -> Sequence[tuple[dist.Work, int]]:
        """Works of all messages, receives first; without those waited for already.

        Posts each other message before, once the one whose memory it needs is over. A call after
        one that raised resumes there.
        """
        for message in self._messages[len(self._posted) :]:
            if message.after is None:
                break  # `post` has failed.
            work, self.peer = self._posted[message.after], self._messages[message.after].peer
            if work is not None:
                work.wait(self.group.limit)
                self._posted[message.after] = None
            self.peer = message.peer
            self._posted.extend(map(_Call.__call__, (message.call,)))  # See `post`.
        posted = zip(self._posted, self._messages, strict=False)
        in_order = sorted(posted, key=lambda each: not each[1].receives)
        return [(work, message.peer) for work, message in in_order if work is not None]


def exchange(
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
        num_steps: a receive may use the memory of the send that many steps before, so it is posted
            after that send; None: all is posted at once. If given, no tensor is empty, or all are.
    """
    pending = Messages(operation, group, outgoing[0].nbytes if nbytes is None else nbytes)
    process_group = group.process_group
    at_once: list[Message] = []
    later: list[Message] = []
    sends: list[int] = []
    """Place in `at_once` of the send of each step."""
    num_steps = group.size if num_steps is None else num_steps
    for step in range(1, group.size):
        # Staggered, so that not every rank starts with rank 0. The send is posted before the
        # receive: a 4 MB message between two ranks of one machine then takes 2.0 to 2.4 ms instead
        # of 3.7 to 3.9 ms (benchmarks/results/collectives_epyc2_202611.md).
        for peer, tensors, method in (
            ((group.rank + step) % group.size, outgoing, process_group.send),
            ((group.rank - step) % group.size, incoming, process_group.recv),
        ):
            tensor, receives = tensors[peer], tensors is incoming
            if not tensor.numel():
                continue
            call = functools.partial(method, [tensor], peer, operation.tag(tensor.nbytes))
            is_late = receives and step > num_steps
            after = sends[step - num_steps - 1] if is_late else None
            if not receives:
                sends.append(len(at_once))
            (later if is_late else at_once).append(Message(call, peer, receives, after))
    return pending.post([*at_once, *later])


def exchange_in_place(
    own: Sequence[torch.Tensor], group: ShardGroup, operation: Operation
) -> tuple[list[torch.Tensor], Pending]:
    """Send own[i] to rank i; return the part from each rank, and the handle.

    See Note [Parts arrive where others have left].
    """
    rank, size = group.rank, group.size
    num_steps = min(size - 1, max(2, size // 2))  # Parts of memory beside the input.
    parts = [*own]
    for step in range(1, size):
        parts[rank - step] = (
            torch.empty_like(own[rank])
            if step <= num_steps
            else own[(rank + step - num_steps) % size]
        )
    return parts, exchange(parts, own, group, operation, num_steps=num_steps)


def broadcast(
    tensor: torch.Tensor, group: ShardGroup, operation: Operation, source: int
) -> Pending:
    """Send `tensor` from group rank `source` to each of the others, which write it.

    gloo's own broadcast waits on a thread of gloo, which a peer that dies amid a message blocks
    until the timeout of the group; destroying the group then waits for that thread.
    """
    nothing = [tensor.new_empty(0)] * group.size
    if group.rank == source:
        return exchange(nothing, [tensor] * group.size, group, operation, tensor.nbytes)
    incoming = [*nothing[:source], tensor, *nothing[source + 1 :]]
    return exchange(incoming, nothing, group, operation, tensor.nbytes)
