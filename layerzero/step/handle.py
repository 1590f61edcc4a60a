"""FlatParamHandle: unshards and reshards one flat parameter, on the streams of its model.

    main shard --cast--> compute shard --all-gather, on unshard--> full buffer

Where the cast writes into the full buffer itself, it runs before each gather, on the same stream.
Into a compute shard that stays for a step it runs once, on pre_unshard, and with an outer axis an
all-gather over outer peers follows (flat/placement.py). What each case holds: flat/flat_param.py.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from layerzero.comm.pending import Operation
from layerzero.comm.streams import Event, Waitable
from layerzero.flat.flat_param import FlatParam, address_of, numel_of, offset_of, version_of
from layerzero.flat.placement import ShardGroup
from layerzero.step.context import RuntimeContext


class FlatParamHandle(FlatParam):
    """One flat parameter, with the collectives that unshard it."""

    _pending: Any = None
    """Gather that compute waits for before it reads the full buffer."""

    def reset_sharded_params(self, unit: str) -> bool:
        """Take over values that a user assigned to `parameter.data`; True if any.

        Raises:
            ValueError: the new tensor's shape, dtype or device is not the sharded parameter's.
        """
        # Addresses are compared, because this runs before most gathers.
        if (
            [*map(address_of, self.placed)] == self.addresses
            and [*map(numel_of, self.sharded_params)] == self.numels
            and all(map(self.mark.__eq__, map(offset_of, self.empty)))
        ):
            return False
        from layerzero.flat.assigned import adopt

        adopt(self, unit)
        return True

    def unshard(self, context: RuntimeContext, unit: str, behind_reductions: bool) -> None:
        """Start filling the full buffer; `wait_for_unshard` orders compute after it.

        Collective over the shard group, and over outer peers if the weights have changed. Does
        not block the host.

        Args:
            unit: label of the unit, for the names of collectives.
            behind_reductions: on CPU, allocate and start once the reductions in flight are done.
        """
        # A gather from the main shard waits for the optimizer's writes. A compute shard that is not
        # stale was written by an earlier call, and the unshard stream has waited for that write.
        written: Event = None
        synced: Waitable | None = None
        versions = [*map(version_of, self.counted)]
        if not self._is_gathered or versions != self._gathered_versions:
            self.post_forward_shard = None
            if versions != self.noted_versions:
                context.note_weights()  # Written inside this forward: a momentum encoder.
                self.noted_versions = versions
            if self.has_compute_shard:
                written, synced = self._sync_compute_shard(context, unit)
            self.note_gathered(versions)
        if not self.has_compute_shard:
            written = context.weights_written
        if self.is_whole:
            self._pending = synced  # The full buffer is the compute shard: that was all.
            return
        group, shard = self.placement.shard_group, self.compute_shard
        if self.post_forward_shard is not None and self.placement.post_forward_group is not None:
            # A forward of this step gathered the same weights, and the ranks of a smaller group
            # kept all of them.
            group, shard = self.placement.post_forward_group, self.post_forward_shard
        if self.buffer.note is not None:
            self.buffer.note(behind_reductions and synced is None)
        # Named here: names count in the order of issue, and on gloo another thread may start it.
        operation = context.operations.next("all-gather", unit, group)
        gather = functools.partial(self._gather, context, shard, group, written, operation)
        if synced is not None or behind_reductions:
            self._pending = context.streams.reduce.start_after(synced, gather)
        else:
            self._pending = gather()

    def _sync_compute_shard(
        self, context: RuntimeContext, unit: str
    ) -> tuple[Event, Waitable | None]:
        """Update the compute shard from the main shards. Collective over outer peers, if any.

        Returns:
            The event after the write of this rank's slice, and a handle for the whole compute
            shard; None where waiting for the event is enough.
        """
        with context.streams.pre_unshard as stream:
            # The cast reads what the optimizer wrote. It may also overwrite a compute shard, whose
            # last readers (gathers and compute of the last pass) come before that event, too.
            stream.wait(context.weights_written)
            self.allocate_compute_shard()
            self.write_compute_slice()
            written = stream.record_event()
            if self.params_on is not None:
                # The device reads host memory here; the host must not write it before that is done.
                context.note_upload(written)
            if self.placement.owns_compute_shard:
                # Usually the gather that follows waits for `written`. If the compute shard is the
                # full buffer no gather follows, and compute itself has to wait.
                return written, stream.drain_handle() if self.is_whole else None
        # The other slices of this compute shard are on outer peers.
        outer = self.placement.outer_group
        assert outer is not None, "else the rank owns its compute shard"
        operation = context.operations.next("outer all-gather", unit, outer)
        with context.streams.unshard as stream:
            stream.wait(written)
            gather = context.extensions.transport.all_gather(
                self.compute_shard, self.compute_slice, outer, operation
            )
            return written, stream.enqueue_wait(gather)

    def _gather(
        self,
        context: RuntimeContext,
        shard: torch.Tensor,
        group: ShardGroup,
        written: Event,
        operation: Operation,
    ) -> Waitable:
        with context.streams.unshard as stream:
            self.allocate_full()
            # The shard has to be written before it is sent. That compute has read what was in this
            # memory before, the stream has waited for when that was freed (`before_free`).
            stream.wait(written)
            if shard is self.compute_shard and self.casts_in_place:
                self.write_compute_slice()
            gather = context.extensions.transport.all_gather(self.gathered, shard, group, operation)
            return stream.enqueue_wait(gather)

    def wait_for_unshard(self, *stream: Any) -> None:
        """Order compute after the gather. Blocks the host only on devices without streams.

        `stream`: the current one, if there are streams and the caller has looked it up."""
        if self._pending is not None:
            self._pending.wait(*stream)

    def reshard(self) -> None:
        """Free the full buffer, after `RuntimeContext.before_free`."""
        self._pending = None
        self.free_full()
