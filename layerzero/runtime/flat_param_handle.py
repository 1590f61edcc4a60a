"""FlatParamHandle: unshards and reshards one flat parameter, on the streams of its model.

    main shard --cast, on pre_unshard--> compute shard --all-gather, on unshard--> full buffer

The first step is made once for each change of the weights, and is not there where the compute shard
is the main shard. With an outer axis it gathers over outer peers, too (core/placement.py).
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from layerzero.comm.collectives import Operation, all_gather
from layerzero.comm.streams import Event, Waitable
from layerzero.core.flat_param import FlatParam
from layerzero.core.groups import ShardGroup
from layerzero.runtime.context import RuntimeContext


class FlatParamHandle(FlatParam):
    """The buffers of one flat parameter, and the way between sharded and unsharded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Arguments as of `FlatParam`."""
        super().__init__(*args, **kwargs)
        self._gathers: list[Waitable] = []

    def unshard(self, context: RuntimeContext, unit: str, behind_reductions: bool) -> None:
        """Start making the full buffer valid; `wait_for_unshard` orders compute after it.

        Collective over the shard group, and over outer peers where the weights have changed. Does
        not block the host.

        Args:
            unit: its label, for the names of collectives.
            behind_reductions: on CPU, allocate and start once the reductions in flight are done.
        """
        # Written by the optimizer, or brought up to date on the streams by an earlier call.
        written: Event = None if self.has_compute_shard else context.weights_written
        synced: Waitable | None = None
        if self.is_stale:
            written, synced = self._sync_compute_shard(context, unit)
        if self.is_whole:
            if synced is not None:
                self._gathers.append(synced)
            return
        group, shard = self.placement.shard_group, self.compute_shard
        if self.post_forward_shard is not None and self.placement.post_forward_group is not None:
            # The same weights were gathered in this forward, and a smaller group has them all.
            group, shard = self.placement.post_forward_group, self.post_forward_shard
        operation = context.operations.next("all-gather", unit, group)
        if synced is None and not behind_reductions:
            self._gathers.append(self._gather(context, shard, group, written, operation))
            return
        gather = functools.partial(self._gather, context, shard, group, written, operation)
        self._gathers.append(
            context.streams.reduce.start_after_pending(gather)
            if synced is None
            else context.streams.unshard.start_after(synced, gather)
        )

    def _sync_compute_shard(
        self, context: RuntimeContext, unit: str
    ) -> tuple[Event, Waitable | None]:
        """Bring the weights' last change into the compute shard. Collective over outer peers.

        Returns:
            A event behind this rank's own part, and what to wait for before the whole is used;
            None where the own part is the whole and is gathered anyway.
        """
        if not self.has_compute_shard:
            self.write_compute_slice()  # Notes the version alone: there is nothing to cast.
            return context.weights_written, None
        with context.streams.pre_unshard as stream:
            # The copy reads what the optimizer wrote, and overwrites what gathers, or compute,
            # read before the optimizer's turn.
            stream.wait(context.weights_written)
            self.write_compute_slice()
            written = stream.record_event()
            if self.params_on is not None:
                context.note_upload(written)
            if self.placement.owns_compute_shard:
                return written, stream.drain_handle() if self.is_whole else None
        outer = self.placement.outer_group
        assert outer is not None, "else the rank owns its compute shard"
        operation = context.operations.next("outer all-gather", unit, outer)
        with context.streams.unshard as stream:
            stream.wait(written)
            gather = all_gather(self.compute_shard, self.compute_slice, outer, operation)
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
            # After the last use of whatever the allocator gave us, and after the shard is there.
            stream.wait(context.full_freed)
            stream.wait(written)
            return stream.enqueue_wait(all_gather(self.full.data, shard, group, operation))

    def wait_for_unshard(self) -> None:
        """Order compute after the gather; blocks the host only where there are no streams."""
        for gather in self._gathers:
            gather.wait()

    def reshard(self) -> None:
        """Free the full buffer, behind whose last use the context has noted an event."""
        self._gathers = []
        self.free_full()
