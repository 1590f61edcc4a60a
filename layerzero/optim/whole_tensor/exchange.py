"""Moves spans between shards and whole tensors: packed, sent, and unpacked, a bucket at a time.

Packing and unpacking run on the compute stream, and only the all-to-all on the unshard stream. So
all buffers belong to compute, which has waited for the all-to-all before it frees them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from layerzero.comm.collectives import all_to_all
from layerzero.comm.streams import Waitable
from layerzero.flat.groups import ShardGroup
from layerzero.optim.whole_tensor.plan import Span, Transfer
from layerzero.step.operations import remembers_failure
from layerzero.step.root import RootState

View = Callable[[Span], torch.Tensor]
"""Returns the elements of a span: a 1-D contiguous tensor of their dtype."""


class Exchange:
    """One exchange in flight."""

    def __init__(
        self, transfer: Transfer, write: View, received: torch.Tensor, work: Waitable | None
    ) -> None:
        self._transfer = transfer
        self._write = write
        self._received = received
        self._work = work

    def finish(self) -> None:
        """Write what has arrived. Orders compute after it; blocks the host on CPU.

        Raises:
            CollectiveError: a rank did not take part.
        """
        if self._work is None:
            return
        self._work.wait()
        spans = [span for spans in self._transfer.incoming for span in spans]
        parts = self._received.split_with_sizes([span.nbytes for span in spans])
        for span, part in zip(spans, parts, strict=True):
            target = _bytes_of(self._write(span))
            target.copy_(part)


@remembers_failure
def start_exchange(
    root: RootState,
    group: ShardGroup,
    transfer: Transfer,
    nbytes: int,
    verb: str,
    read: View,
    write: View,
) -> Exchange:
    """Pack and send a bucket, and copy what stays on this rank. Collective over the group.

    Does not block the host, unless shards are offloaded.

    Args:
        nbytes: sum over all ranks of what is sent.
        verb: name of the collective.
        read: where the elements of a span come from; called before this function returns.
        write: where they go; called for `transfer.own` now, for the others by `finish`.
    """
    for span in transfer.own:
        source, target = read(span), write(span)
        if source.data_ptr() != target.data_ptr():
            target.copy_(source)
    device = root.device
    received = torch.empty(_nbytes_of(transfer.incoming), dtype=torch.uint8, device=device)
    if not nbytes:
        return Exchange(transfer, write, received, None)
    sources = [_bytes_of(read(span)) for spans in transfer.outgoing for span in spans]
    sent = torch.empty(_nbytes_of(transfer.outgoing), dtype=torch.uint8, device=device)
    if sources:
        if sources[0].device == device:
            torch.cat(sources, out=sent)
        else:
            sent.copy_(torch.cat(sources))
    operation = root.operations.next(verb, "the optimizer", group)
    packed = root.streams.record_compute_event()
    with root.streams.unshard as stream:
        stream.wait(packed)
        pending = all_to_all(
            received,
            [sum(span.nbytes for span in spans) for spans in transfer.incoming],
            sent,
            [sum(span.nbytes for span in spans) for spans in transfer.outgoing],
            group,
            operation,
            nbytes,
        )
        return Exchange(transfer, write, received, _Keeping(stream.enqueue_wait(pending), sent))


class _Keeping:
    """A handle that keeps what is sent until it has been read."""

    def __init__(self, work: Waitable, sent: torch.Tensor) -> None:
        self._work = work
        self._sent_keepalive: torch.Tensor | None = sent

    def wait(self) -> None:
        self._work.wait()
        self._sent_keepalive = None


def _nbytes_of(spans: Sequence[Sequence[Span]]) -> int:
    return sum(span.nbytes for each in spans for span in each)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)
