"""GradientSums: what earlier micro-batches left of a flat parameter's gradients (`no_sync`).

Micro-batches without synchronization add up in one of two places, in float32 at least: unsharded,
before anything is sent, or sharded, after the first hop of the reduction. Either sum may be on the
host.

Note [A pass adds only when it is complete]
    What earlier micro-batches left is not written before the pass that adds to it has ended, so
    that one that fails leaves it as it was. Unsharded, a micro-batch's gradients are held until
    then, in the dtype in which backward computed them; the sum that is sent is written elsewhere.
    Sharded and on the host, each micro-batch writes a new sum. `keep` ends a pass, `undo` takes it
    back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import torch

from layerzero.flat.buffer import Buffer
from layerzero.flat.gradients import MISSING, GradientBuffer
from layerzero.flat.layout import ShardRange
from layerzero.ops import pack_


class _Earlier(NamedTuple):
    """Sums of completed micro-batches; see Note [A pass adds only when it is complete]."""

    area: Buffer | None
    """The area that holds the unsharded sum, if any."""
    shard_sum: torch.Tensor | None
    host_sum: torch.Tensor | None
    present: set[int]


_NOTHING = _Earlier(None, None, None, set())


class GradientSums(GradientBuffer):
    """A `GradientBuffer` that adds to what earlier micro-batches left."""

    _earlier = _NOTHING
    _pending: Sequence[list[torch.Tensor]] = ()
    """Gradients to add to the sum once the pass is complete."""
    _spare: Buffer | None = None
    """Like `_sum`, made when a sum is first written elsewhere."""

    def _runs_in(self, flat: torch.Tensor) -> Iterator[ShardRange]:
        """Parts of gradients in a sum: the whole buffer, or the chunk that a first hop leaves,
        which has the chunks of one or more main shards in their order."""
        num_pieces, world = self.layout.padded_numel // flat.numel(), self._placement.world
        piece = self._placement.main_shard_index * num_pieces // self.layout.group_size
        if world is not None and num_pieces > 1:  # Copies of a main shard have a slice each.
            piece = self._placement.world_slices[world.rank]
        return self.layout.runs_in(piece * flat.numel(), flat.numel())

    def add_to_sum(self, gradients: list[torch.Tensor], keep_accumulating: bool) -> None:
        former = self._sum
        if former is self._earlier.area and keep_accumulating:
            self._pending = [*self._pending, gradients]
            return
        self._sum, self._spare = self._spare or self.area(self.sum_dtype), None
        self._sum.allocate()
        pack_(self._sum.tensor, gradients, self.segments).add_(former.tensor)
        if former is not self._earlier.area:
            former.free()
            self._spare = former
        if not keep_accumulating and not self.sum_is_buffer:
            self.allocate_buffer()
            self.fill_buffer()
            self._sum.free()

    def fill_buffer(self) -> None:
        """Cast the sum into the buffer, which must be allocated."""
        if not self.sum_is_buffer:
            self._outgoing.tensor.copy_(self._sum.tensor)

    def allocate_buffer(self) -> None:
        """Allocate `buffer`; `collect` did if it holds the sum."""
        # To resize a storage on a device to the size it has allocates again, and copies.
        if not self.sum_is_buffer:
            self._outgoing.allocate()

    def pending_additions(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Parts of the sum, and the gradients to add to them before `keep`."""
        targets, sources = [], []
        for index, gradient in chain.from_iterable(map(enumerate, self._pending)):
            if gradient is not MISSING:
                start, numel = self.layout.starts[index], self.layout.numels[index]
                part = self._sum.tensor[start : start + numel]
                targets.append(part.view(self._shapes[index]))
                sources.append(gradient)
        return targets, sources

    def keep(self) -> None:
        """Keep the sums of a complete pass, and drop earlier ones."""
        self._pending = ()
        area = self._sum if self.holds_sum else None
        former = self._earlier.area
        if former is not None and former is not self._sum:
            former.free()
            self._spare = former
            if area is None:
                # What was sent was the copy. Each area serves alike in every step, at its address.
                self._spare, self._sum = self._sum, former
        if self.is_waiting:
            self._earlier = _Earlier(area, self.shard_sum, self.host_sum, set(self.present))
        else:
            self._earlier = _NOTHING

    def undo(self) -> None:
        """Return to the state after the last complete pass. No reduction may be under way."""
        before = self._earlier
        self._pending = ()
        self._outgoing.free()
        if self._sum is not before.area:
            self._sum.free()
            if before.area is not None:
                self._spare, self._sum = self._sum, before.area
        self.holds_sum = before.area is not None
        self.shard_sum, self.host_sum = before.shard_sum, before.host_sum
        self.present = set(before.present)

    def waiting(self, index: int) -> Iterator[tuple[int, torch.Tensor]]:
        """(start in the flattened gradient, flat view) of each part of what waits of it."""
        earlier = self._earlier  # Also amid a pass, or after one that has failed.
        area = None if earlier.area is None else earlier.area.tensor
        for flat in filter(torch.is_tensor, (area, earlier.shard_sum, earlier.host_sum)):
            for run in self._runs_in(flat):
                if run.param == index:
                    yield run.start, flat[run.offset : run.offset + run.numel]

    def drop_waiting(self, index: int) -> None:
        for _, part in self.waiting(index):
            part.zero_()
        self.present.discard(index)
        self.keep()

    def forget(self) -> None:
        """Drop all gradients, those of earlier micro-batches included."""
        area, self._earlier = self._earlier.area, _NOTHING
        self.undo()
        if area is not None:
            area.free()

    def add_sharded(self, chunk: torch.Tensor) -> torch.Tensor:
        """Add the first hop's chunk to `shard_sum` and return that; it may share chunk's memory."""
        if self.shard_sum is None:
            self.shard_sum = chunk.to(self.sum_dtype)
        else:  # Not in place: see Note [A pass adds only when it is complete].
            self.shard_sum = self.shard_sum + chunk
        return self.shard_sum

    def add_host_sum_to(self, target: torch.Tensor) -> None:
        """Add `host_sum`, if any, to `target`, on the current stream."""
        if self.host_sum is not None:
            staged = torch.empty_like(target)
            staged.copy_(self.host_sum, non_blocking=True)
            target.add_(staged)

    def send_to_host(self, total: torch.Tensor) -> None:
        """Add `host_sum` to `total`, and start copying the result to the host.

        Runs on the current stream; does not block the host if the memory is pinned.
        """
        assert self.sums_on is not None
        self.add_host_sum_to(total)
        if self.host_sum is None or self.host_sum is self._earlier.host_sum:
            self.host_sum = self.sums_on.empty(total.numel(), total.dtype)
        self.host_sum.copy_(total, non_blocking=True)

    def take_host_sum(self, target: torch.Tensor) -> None:
        """Move `host_sum` into `target`, which adds to it, on the current stream."""
        self.add_host_sum_to(target)
        self.host_sum = None
