"""Reduction: the way of a unit's gradients from a full buffer to this rank's part of their sum.

    leaves --collect--> buffer --first hop--> chunk --second hop--> chunk --> `.grad` of the pieces

A micro-batch that is not the last goes as far as sums are kept: to the buffer, or through the first
hop. What waits there may be on the host; then it comes back, grows and leaves again on a stream of
its own, while the next unit computes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from layerzero.comm.collectives import all_gather, reduce_scatter
from layerzero.comm.streams import CommStream, Event, Waitable
from layerzero.runtime.context import RuntimeContext
from layerzero.runtime.flat_param_handle import FlatParamHandle
from layerzero.runtime.unit import Unit


def reduce_unit(
    context: RuntimeContext, unit: Unit, is_last: bool, sums_sharded: bool
) -> list[Reduction]:
    """Take the leaves' gradients and start reducing them, or let them wait for more.

    Collective, in unit order, over the groups of the hops that are made.

    Args:
        is_last: the sum over micro-batches is complete: all hops are made.
        sums_sharded: otherwise the first hop is, where it leaves a shard.
    """
    reductions = []
    for handle in unit.handles:
        gradients, placement = handle.gradients, handle.placement
        if not gradients.layout.trainable:
            continue
        in_shards = sums_sharded and placement.sums_in_shards
        if is_last or in_shards:
            reduction = Reduction(context, unit, handle, is_partial=not is_last)
            reduction.start(in_shards)
            reductions.append(reduction)
        else:
            gradients.collect(handle.full_params, keep_accumulating=True)
            if gradients.sums_on is not None and placement.num_ranks > 1:
                reduction = Reduction(context, unit, handle, is_partial=True)
                reduction.start_offload()
                reductions.append(reduction)
    return reductions


class Reduction:
    """A gradient reduction under way: the chunk is valid once `pending` was waited for.

    A *partial* one is of a micro-batch that is not the last: its result waits in the
    `GradientBuffer` for that of the next.
    """

    unit: Unit
    handle: FlatParamHandle
    present: set[int]
    """Parameters that had a gradient on this rank."""
    is_partial: bool
    chunk: torch.Tensor | None
    pending: Waitable | None
    landed: Event
    """Behind the copy of the chunk to the host, where parameters are offloaded."""

    def __init__(
        self, context: RuntimeContext, unit: Unit, handle: FlatParamHandle, is_partial: bool
    ) -> None:
        self.unit = unit
        self.handle = handle
        self.present = handle.gradients.present
        self.is_partial = is_partial
        self.chunk = None
        self.pending = None
        self.landed = None
        self._context = context

    def start(self, in_shards: bool) -> None:
        """Take the leaves' gradients and send them.

        Args:
            in_shards: micro-batches add up after the first hop.
        """
        handle, gradients, context = self.handle, self.handle.gradients, self._context
        # A sum that waits unsharded on the host is added to the buffer before the first hop; one
        # that waits in shards is added to the chunk after it, in `_hops`.
        comes_back = gradients.host_sum is not None and not in_shards
        gradients.collect(handle.full_params, keep_accumulating=comes_back)
        self.present = gradients.present
        if handle.placement.num_ranks == 1:
            return
        if comes_back:
            gradients.allocate_buffer()
        collected = context.streams.record_compute_event()
        with context.streams.reduce as stream:
            # The buffers were filled, and allocated, on the compute stream; and the memory of an
            # earlier chunk may be used again, which was copied to the host.
            stream.wait(collected)
            stream.wait(context.chunk_offloaded)
            if comes_back:
                with context.streams.offload as offload:
                    offload.wait(collected)
                    gradients.add_host_sum_to(gradients.sum)
                    stream.wait(offload.record_event())
                gradients.drop_host_sum()
                gradients.fill_buffer()
            self.pending = self._send(stream)

    def start_offload(self) -> None:
        """Send the unsharded sum, of which more is to come, to the host."""
        gradients, streams = self.handle.gradients, self._context.streams
        collected = streams.record_compute_event()
        with streams.offload as offload:
            offload.wait(collected)
            gradients.send_to_host(gradients.sum)
            self.pending = offload.drain_handle()

    def _send(self, stream: CommStream) -> Waitable:
        """Start the hops that turn this rank's gradients into its part of the sum."""
        context, unit, handle = self._context, self.unit, self.handle
        gradients, placement, options = handle.gradients, handle.placement, unit.options
        groups = placement.reduce_groups[:1] if self.is_partial else placement.reduce_groups
        names = ["reduce-scatter", "outer reduce-scatter"]
        # Named before any is started: names count in the order of issue, and on gloo the later
        # hops are issued by another thread.
        operations = [
            context.operations.next(name, unit.label, group)
            for name, group in zip(names, groups, strict=False)
        ]
        # The mean is taken after the last sum, where nothing is rounded that is still to be added;
        # but float16 has no room for a sum that is not scaled yet.
        scales = [1.0] * len(placement.reduce_groups)
        scales[0 if gradients.buffer.dtype == torch.float16 else -1] = options.gradient_scale
        chunk, started = reduce_scatter(
            gradients.buffer,
            groups[0],
            operations[0],
            scale=scales[0],
            deterministic=options.deterministic,
            order=None if placement.world is None else placement.world_slices,
        )
        adds_up = self.is_partial or gradients.is_waiting_after_first_hop
        copies = placement.owned_slices > 1 and not self.is_partial
        if len(groups) == 1 and not copies and not adds_up and handle.params_on is None:
            # The ordinary case: nothing follows the one hop, so no thread has to wait for it.
            self.chunk = chunk
            return stream.enqueue_wait(started, on_done=gradients.free_buffer)
        outer = placement.outer_group
        if copies:
            assert outer is not None, "copies are on outer peers"
            operations.append(context.operations.next("outer all-gather", unit.label, outer))

        def hops(input_done: Callable[[], None]) -> None:
            nonlocal chunk
            started.wait()
            input_done()
            if adds_up and gradients.sums_on is None:
                chunk = gradients.add_sharded(chunk)
            elif adds_up:
                chunk = self._add_up_on_host(chunk, stream)
            if self.is_partial:
                return
            if len(groups) > 1:
                # Sums are float32 at least; what travels is of the reduce dtype.
                travels = chunk.to(gradients.buffer.dtype)
                chunk, second = reduce_scatter(
                    travels, groups[1], operations[1], scales[1], options.deterministic
                )
                second.wait()
            if copies:
                assert outer is not None
                own, chunk = chunk, chunk.new_empty(chunk.numel() * placement.owned_slices)
                all_gather(chunk, own, outer, operations[-1]).wait()
            self.chunk = chunk
            if handle.params_on is not None:
                self._download(chunk, stream)

        return stream.run(hops, gradients.free_buffer)

    # Between device and host ----------------------------------------------------------------

    def _add_up_on_host(self, chunk: torch.Tensor, stream: CommStream) -> torch.Tensor:
        """`GradientBuffer.add_sharded` where the sum is on the host; `stream` made the chunk."""
        gradients, context = self.handle.gradients, self._context
        chunk = chunk.to(gradients.sum.dtype)
        ready = stream.record_event()
        with context.streams.offload as offload:
            offload.wait(ready)
            if self.is_partial:
                gradients.send_to_host(chunk)
            else:
                gradients.add_host_sum_to(chunk)
                gradients.drop_host_sum()
            context.note_offload(offload.record_event())
        if not self.is_partial:
            stream.wait(context.chunk_offloaded)  # The next hop reads what was added.
        return chunk

    def _download(self, chunk: torch.Tensor, stream: CommStream) -> None:
        """Start copying the reduced chunk to where the main shard is."""
        assert self.handle.params_on is not None
        chunk = chunk.to(self.handle.main_shard.dtype)
        ready = stream.record_event()
        with self._context.streams.offload as offload:
            offload.wait(ready)
            self.chunk = self.handle.params_on.empty(chunk.numel(), chunk.dtype)
            self.chunk.copy_(chunk, non_blocking=True)
            self.landed = offload.record_event()
        self._context.note_offload(self.landed)
