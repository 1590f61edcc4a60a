"""Reduction: reduces a unit's gradients from a full buffer to this rank's chunk of their sum.

    unsharded .grad --collect--> buffer --first hop--> chunk --second hop--> chunk --> sharded .grad

Inside `no_sync` gradients stop where sums accumulate: in the buffer, or after the first hop. The
sum may be kept on the host; then each micro-batch copies it to the device, adds to it and copies it
back, on the offload stream, while the next unit computes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from layerzero.comm.streams import CommStream, Event, InlineStream, Waitable
from layerzero.flat.placement import ShardGroup
from layerzero.step.context import RuntimeContext
from layerzero.step.handle import FlatParamHandle
from layerzero.step.unit import Unit


def reduce_unit(
    context: RuntimeContext, unit: Unit, is_last: bool, sums_sharded: bool
) -> list[Reduction]:
    """Take the gradients of the unsharded parameters and start reducing, or accumulate them.

    Collective over the groups of the hops that run; every rank must reduce units in one order.

    Args:
        is_last: the sum over micro-batches is complete, so all hops run.
        sums_sharded: if not `is_last`, run the first hop where it shards, and accumulate after it.

    Returns:
        The reductions under way, at most one for each flat parameter.
    """
    reductions = []
    for handle in unit.handles:
        gradients = handle.gradients
        if not gradients.trainable:
            continue
        in_shards = sums_sharded and handle.placement.sums_in_shards
        if is_last or in_shards or gradients.sums_on is not None:
            reduction = Reduction(context, unit, handle, is_partial=not is_last)
            reduction.start(in_shards)
            reductions.append(reduction)
        else:
            # The sum stays unsharded on the device, and nothing is sent.
            gradients.collect(handle.unsharded_params, keep_accumulating=True)
    return reductions


class Reduction:
    """A gradient reduction under way; `chunk` is valid after a wait for `pending`.

    A *partial* reduction is that of a micro-batch other than the last: its result stays in the
    `GradientSums`, and the next micro-batch adds to it. Without a hop to run, the chunk is all of
    the buffer: on one rank alone, and of an unsharded sum that waits on the host.
    """

    present: set[int]
    """Indices of the parameters that had a gradient on this rank."""
    chunk: torch.Tensor
    """[chunk_numel] of the gradients' layout; unset if partial."""
    pending: Waitable
    landed: Event = None
    """Event after the copy of the chunk to the host, where parameters are offloaded."""

    def __init__(
        self, context: RuntimeContext, unit: Unit, handle: FlatParamHandle, is_partial: bool
    ) -> None:
        self.unit = unit
        self.handle = handle
        self.present = handle.gradients.present
        self.is_partial = is_partial
        self._context = context

    def start(self, in_shards: bool) -> None:
        """Take the gradients of the unsharded parameters, and start the hops.

        Args:
            in_shards: micro-batches accumulate after the first hop.
        """
        handle, gradients, context = self.handle, self.handle.gradients, self._context
        # An unsharded sum on the host is added here, before the first hop. A sharded one has the
        # size of a chunk, and is added after it (`hops` in `_start_hops`).
        waits = self.is_partial and not in_shards
        comes_back = gradients.host_sum is not None and not (in_shards or waits)
        for_hook = bool(context.extensions.reduce)
        gradients.collect(handle.unsharded_params, comes_back or waits, for_hook)
        if comes_back:
            gradients.allocate_buffer()
        result = self._allocate_chunk(in_shards)
        collected = context.streams.record_compute_event(context.streams.main)
        with context.streams.reduce as stream:
            stream.wait(collected)  # The buffers are allocated and filled on the compute stream.
            if comes_back:
                # Added in the dtype of sums (float32 at least), then cast into the buffer to send.
                with context.streams.offload as offload:
                    offload.wait(collected)
                    gradients.take_host_sum(gradients.sum)
                    stream.wait(offload.record_event())
                gradients.fill_buffer()
            groups = handle.placement.reduce_groups
            groups = groups[: int(in_shards)] if self.is_partial else groups
            self.pending = self._start_hops(stream, result, groups)

    def _allocate_chunk(self, in_shards: bool) -> torch.Tensor | None:
        """[chunk_numel] memory of the compute stream for what the last hop leaves.

        Compute reads it, as `.grad`, and dropping `.grad` frees it: in the pool of another stream
        the memory could be given back while compute still reads it.

        Returns:
            None where memory has no stream (CPU), and where the chunk goes elsewhere: to a sum, or
            to the host.
        """
        handle, gradients = self.handle, self.handle.gradients
        if self.is_partial or handle.params_on is not None or not self._context.streams.are_apart:
            return None
        dtype = gradients.dtype
        adds_up = in_shards and gradients.is_waiting_after_first_hop
        if adds_up and len(handle.placement.reduce_groups) == 1:
            dtype = gradients.sum_dtype
        elif self.unit.options.deterministic:
            dtype = torch.promote_types(dtype, torch.float32)
        return torch.empty(gradients.layout.shard_numel, dtype=dtype, device=gradients.device)

    def _start_hops(
        self, stream: CommStream, result: torch.Tensor | None, groups: tuple[ShardGroup, ...]
    ) -> Waitable:
        """Start the hops: reduce-scatter, outer reduce-scatter, and an all-gather to replicas."""
        context, unit, handle = self._context, self.unit, self.handle
        gradients, placement, options = handle.gradients, handle.placement, unit.options
        # Named before the first one starts: names count in the order of issue, and on gloo another
        # thread issues the later hops.
        operations = []
        for verb, group in zip(("reduce-scatter", "outer reduce-scatter"), groups, strict=False):
            operations.append(context.operations.next(verb, unit.label, group))
        # Scale after the last sum: scaling rounds, and rounding errors would add up. Except in
        # float16, where a sum that is not scaled yet could overflow: scale in the first hop.
        scales = [1.0] * max(len(placement.reduce_groups), 1)
        scales[0 if gradients.dtype == torch.float16 else -1] = options.gradient_scale
        given = self._reduced_by_extension(groups[0], scales) if groups else None
        # Sums that wait in shards: this chunk is added to them, or is the first of them.
        adds_up = self.is_partial or gradients.is_waiting_after_first_hop
        # With `outer="replicate"` several ranks own this shard. Each reduces one slice of it and
        # then needs the others: reduce-scatter plus all-gather, instead of an all-reduce.
        copies = placement.owned_slices > 1 and not self.is_partial
        if given is not None and len(groups) == 1:
            copies = copies and given.numel() < gradients.layout.shard_numel
        is_only_hop = len(groups) == 1 and not copies and not adds_up and handle.params_on is None
        is_only_hop = is_only_hop and given is None and not context.extensions.reduced
        transport = context.extensions.transport
        started: Waitable
        if given is not None:
            chunk, started = given, stream.drain_handle()
        elif not groups:
            if self.is_partial:
                chunk = gradients.sum
            else:
                chunk = torch.mul(gradients.buffer, scales[0], out=result)
            started = stream.drain_handle()
        else:
            chunk, started = transport.reduce_scatter(
                gradients.buffer,
                groups[0],
                operations[0],
                scales[0],
                options.deterministic,
                None if placement.world is None else placement.world_slices,
                result if is_only_hop else None,
            )
        if is_only_hop:
            # The ordinary case: no work depends on the result of the only hop. `stream.run` would
            # block the host until it is done, where there are neither streams nor a thread.
            self.chunk = chunk
            return stream.enqueue_wait(started, on_done=gradients.free_buffer)
        if copies:
            operations.append(
                context.operations.next("outer all-gather", unit.label, placement.copy_group)
            )

        def hops(input_done: Callable[[], None]) -> None:
            nonlocal chunk
            started.wait()
            if groups:  # Only the first hop reads the full buffer; free it while the others run.
                input_done()
            if adds_up and gradients.sums_on is None:
                chunk = gradients.add_sharded(chunk)
            elif adds_up:
                chunk = self._add_up_on_host(chunk, stream)
            if self.is_partial:
                return  # The other hops run once, for the sum over all micro-batches.
            if len(groups) > 1:
                # Sums are float32 at least; the second hop sends the reduce dtype.
                travels = chunk.to(gradients.dtype)
                chunk, second = transport.reduce_scatter(
                    travels, groups[1], operations[1], scales[1], options.deterministic
                )
                second.wait()
            if copies:
                own, chunk = chunk, chunk.new_empty(chunk.numel() * placement.owned_slices)
                transport.all_gather(chunk, own, placement.copy_group, operations[-1]).wait()
            for reduced in context.extensions.reduced:
                reduced(unit, chunk)
            self.chunk = chunk if result is None else result.copy_(chunk)
            if handle.params_on is not None:
                self._download(chunk, stream)

        if context.extensions.reduced and isinstance(stream, InlineStream):
            return InlineStream.run(stream, hops, gradients.free_buffer)  # Not on a thread.
        return stream.run(hops, gradients.free_buffer)

    def _reduced_by_extension(self, group: ShardGroup, scales: list[float]) -> torch.Tensor | None:
        """The chunk that the first hop leaves, if an extension runs that; adapts the scales."""
        for reduce in self._context.extensions.reduce:
            own = scales
            if len(scales) > 1 and scales[0] == 1.0:  # A mean in each hop, as in torch.
                own = [1.0 / group.size, scales[1] * group.size]
            chunk: torch.Tensor | None = reduce(self.unit, self.handle, group, own[0])
            if chunk is not None:
                scales[:] = own
                return chunk
        return None

    def _add_up_on_host(self, chunk: torch.Tensor, stream: CommStream) -> torch.Tensor:
        """`GradientSums.add_sharded` for a sum on the host; `stream` produces the chunk.

        Returns:
            The chunk in the dtype of sums; the complete sum if the reduction is not partial.
        """
        gradients, context = self.handle.gradients, self._context
        chunk = chunk.to(gradients.sum_dtype)
        ready = stream.record_event()
        with context.streams.offload as offload:
            offload.wait(ready)
            if self.is_partial:
                gradients.send_to_host(chunk)
            else:
                # The last micro-batch: the sum is needed on the device, not on the host.
                gradients.take_host_sum(chunk)
            # The next hop reads the sum; or the chunk is freed, whose memory is the stream's.
            stream.wait(offload.record_event())
        return chunk

    def _download(self, chunk: torch.Tensor, stream: CommStream) -> None:
        """Start copying the reduced chunk to the host memory that holds the main shard."""
        assert self.handle.params_on is not None
        # Cast on the device: the copy then has the optimizer's dtype, and the host does no work.
        chunk = chunk.to(self.handle.main_shard.dtype)
        ready = stream.record_event()
        with self._context.streams.offload as offload:
            offload.wait(ready)
            self.chunk = self.handle.params_on.empty(chunk.numel(), chunk.dtype)
            self.chunk.copy_(chunk, non_blocking=True)
            self.landed = offload.record_event()
            stream.wait(self.landed)
