"""Reduction: the way of a unit's gradients from a full buffer to this rank's part of their sum.

    leaves --collect--> buffer --first hop--> chunk --second hop--> chunk --> `.grad` of the pieces

A micro-batch that is not the last goes as far as sums are kept: to the buffer, or through the first
hop. What waits there may be on the host; then it comes back, grows and leaves again on a lane of
its own, while the next unit computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from layerzero.comm.collectives import all_gather, reduce_scatter
from layerzero.comm.streams import Lane, Mark, Waitable
from layerzero.core.flat_param import FlatParamHandle
from layerzero.core.gradients import GradientBuffer
from layerzero.runtime.unit import Unit

if TYPE_CHECKING:
    from layerzero.runtime.root import RootState


@dataclass
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
    chunk: torch.Tensor | None = None
    pending: Waitable | None = None
    landed: Mark = None
    """Behind the copy of the chunk to the host, where parameters are offloaded."""


def reduce_unit(root: RootState, unit: Unit, is_last: bool, sums_sharded: bool) -> list[Reduction]:
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
            reductions.append(_reduce(root, unit, handle, is_last, in_shards))
        else:
            gradients.collect(handle.full_params, stays=True)
            if gradients.sums_on is not None and placement.num_ranks > 1:
                reduction = Reduction(unit, handle, gradients.present, is_partial=True)
                reduction.pending = _offload_sum(root, gradients)
                reductions.append(reduction)
    return reductions


def _reduce(
    root: RootState, unit: Unit, handle: FlatParamHandle, is_last: bool, in_shards: bool
) -> Reduction:
    gradients = handle.gradients
    comes_back = gradients.host_sum is not None and not in_shards
    gradients.collect(handle.full_params, stays=comes_back)
    reduction = Reduction(unit, handle, gradients.present, is_partial=not is_last)
    if handle.placement.num_ranks == 1:
        return reduction
    if comes_back:
        gradients.allocate_buffer()
    collected = root.streams.mark_compute()
    with root.streams.reduce as lane:
        # The buffers were filled, and allocated, on the compute stream; and the memory of an
        # earlier chunk may be used again, which was copied to the host.
        lane.wait(collected)
        lane.wait(root.offloaded_mark)
        if comes_back:
            with root.streams.offload as offload:
                offload.wait(collected)
                _add_host_sum(gradients, gradients.sum)
                lane.wait(offload.mark())
            gradients.host_sum = None
            gradients.fill_buffer()
        reduction.pending = _start(root, reduction, lane)
    return reduction


def _start(root: RootState, reduction: Reduction, lane: Lane) -> Waitable:
    """Start the hops that turn this rank's gradients into its part of the sum."""
    unit, handle, gradients = reduction.unit, reduction.handle, reduction.handle.gradients
    placement, options = handle.placement, unit.options
    groups = placement.hops[:1] if reduction.is_partial else placement.hops
    names = ["reduce-scatter", "outer reduce-scatter"]
    operations = [
        root.operations.next(name, unit.label, group)
        for name, group in zip(names, groups, strict=False)
    ]
    # After the last sum; but float16 has no room for a sum that is not scaled yet.
    scales = [1.0] * len(placement.hops)
    scales[0 if gradients.buffer.dtype == torch.float16 else -1] = options.gradient_scale
    chunk, started = reduce_scatter(
        gradients.buffer,
        groups[0],
        operations[0],
        scale=scales[0],
        deterministic=options.deterministic,
        order=None if placement.world is None else placement.world_slices,
    )
    adds_up = reduction.is_partial or gradients.is_waiting_after_first_hop
    copies = placement.owned_slices > 1 and not reduction.is_partial
    if len(groups) == 1 and not copies and not adds_up and handle.params_on is None:
        reduction.chunk = chunk
        return lane.settle(started, then=gradients.free_buffer)
    outer = placement.outer_group
    if copies:
        assert outer is not None, "copies are on outer peers"
        operations.append(root.operations.next("outer all-gather", unit.label, outer))

    def hops(input_done: Callable[[], None]) -> None:
        nonlocal chunk
        started.wait()
        input_done()
        if adds_up and gradients.sums_on is None:
            chunk = gradients.add_sharded(chunk)
        elif adds_up:
            chunk = _add_up_on_host(root, gradients, chunk, lane, reduction.is_partial)
        if reduction.is_partial:
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
        reduction.chunk = chunk
        if handle.params_on is not None:
            _download(root, reduction, chunk, lane)

    return lane.run(hops, gradients.free_buffer)


# Between device and host ----------------------------------------------------------------------


def _add_host_sum(gradients: GradientBuffer, target: torch.Tensor) -> None:
    """Add what waits on the host, through memory of the lane that is entered."""
    if gradients.host_sum is not None:
        staged = torch.empty_like(target)
        staged.copy_(gradients.host_sum, non_blocking=True)
        target.add_(staged)


def _offload_sum(root: RootState, gradients: GradientBuffer) -> Waitable:
    """Add what waits on the host to the unsharded sum, and send it there."""
    collected = root.streams.mark_compute()
    with root.streams.offload as offload:
        offload.wait(collected)
        _send_to_host(gradients, gradients.sum)
        return offload.so_far()


def _add_up_on_host(
    root: RootState, gradients: GradientBuffer, chunk: torch.Tensor, lane: Lane, stays: bool
) -> torch.Tensor:
    """`GradientBuffer.add_sharded` where the sum is on the host; `lane` made the chunk."""
    chunk = chunk.to(gradients.sum.dtype)
    ready = lane.mark()
    with root.streams.offload as offload:
        offload.wait(ready)
        if stays:
            _send_to_host(gradients, chunk)
        else:
            _add_host_sum(gradients, chunk)
            gradients.host_sum = None
        root.offloaded_mark = offload.mark()
    if not stays:
        lane.wait(root.offloaded_mark)
    return chunk


def _send_to_host(gradients: GradientBuffer, total: torch.Tensor) -> None:
    assert gradients.sums_on is not None
    _add_host_sum(gradients, total)
    if gradients.host_sum is None:
        gradients.host_sum = gradients.sums_on.empty(total.numel(), total.dtype)
    gradients.host_sum.copy_(total, non_blocking=True)


def _download(root: RootState, reduction: Reduction, chunk: torch.Tensor, lane: Lane) -> None:
    """Start copying the reduced chunk to where the main shard is."""
    assert reduction.handle.params_on is not None
    chunk = chunk.to(reduction.handle.main_shard.dtype)
    ready = lane.mark()
    with root.streams.offload as offload:
        offload.wait(ready)
        reduction.chunk = reduction.handle.params_on.empty(chunk.numel(), chunk.dtype)
        reduction.chunk.copy_(chunk, non_blocking=True)
        reduction.landed = root.offloaded_mark = offload.mark()
