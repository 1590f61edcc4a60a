"""GradientBuffer: gradients of one flat parameter, from the leaves to the sharded parameters.

    leaf.grad --collect--> buffer [group_size * chunk_numel] --reduction--> chunk --deliver-->
    sharded.grad

One copy per gradient; the buffer's storage exists only from the first `collect` until the
reduction is done. Without a reduction (`no_sync`) it stays and further gradients add up in it.
`deliver` is the only writer of `.grad`, so a backward pass that fails changes no gradient the
user can see.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from layerzero.core.layout import FlatLayout, GradientLayout, Piece
from layerzero.core.placement import Placement
from layerzero.ops import Segments, pack_

_MISSING = torch.empty(0)
"""Stands for a gradient that is not there: zeros."""


class GradientBuffer:
    """Collects full gradients of one flat parameter and hands out this rank's part of the sum."""

    present: set[int]
    """Parameters that had a gradient on this rank since the last reduction."""
    holds_sum: bool
    """Whether gradients wait in the buffer (or, on one rank, in `_local`)."""

    def __init__(
        self,
        layout: FlatLayout,
        shapes: Sequence[torch.Size],
        placement: Placement,
        dtype: torch.dtype,
        device: torch.device,
        sharded_params: list[nn.Parameter],
    ) -> None:
        self._layout = layout
        self._shapes = shapes
        self._placement = placement
        self._dtype = dtype
        self._device = device
        self._sharded_params = sharded_params
        self._local: dict[int, torch.Tensor] = {}
        self.present = set()
        self.holds_sum = False
        self.set_trainable(range(len(shapes)))

    def set_trainable(self, indices: Sequence[int]) -> None:
        """Lay the buffer out for the parameters that require grad now.

        Raises:
            RuntimeError: gradients of the former set are still waiting to be reduced.
        """
        if self.holds_sum:
            raise RuntimeError(
                "parameters were frozen or unfrozen while unreduced gradients wait (no_sync): "
                "change requires_grad between optimizer steps, not inside an accumulation"
            )
        self.layout = GradientLayout.build(self._layout, indices)
        self._source = {index: place for place, index in enumerate(self.layout.trainable)}
        with torch.inference_mode(False):
            self.buffer = torch.empty(self.layout.numel, dtype=self._dtype, device=self._device)
            self._storage = self.buffer.untyped_storage()
            self._nbytes = self._storage.nbytes()
            self._places = [self._place(segment) for segment in self.layout.segments]
        self._storage.resize_(0)
        self._segments = Segments.build(
            ((self._source[p.param], p.start, p.offset, p.numel) for p in self.layout.segments),
            self.layout.numel,
        )
        self._split_sizes, self._split_indices = self._plan_split()

    def _place(self, segment: Piece) -> tuple[int, slice | None, torch.Tensor]:
        """(parameter, which part of its gradient, where that goes); None: all, in its shape."""
        target = self.buffer[segment.offset : segment.offset + segment.numel]
        if segment.numel == self._layout.numels[segment.param]:
            return segment.param, None, target.view(self._shapes[segment.param])
        return segment.param, slice(segment.start, segment.stop), target

    def _plan_split(self) -> tuple[list[int], list[int]]:
        """Sizes that cut this rank's chunk into pieces and gaps, and each part's parameter."""
        sizes, indices, end = [], [], 0
        own = self.layout.chunks[self._placement.main_shard_index]
        for piece in sorted(own, key=lambda piece: piece.offset):
            if piece.numel and piece.offset > end:
                sizes.append(piece.offset - end)
                indices.append(-1)
            sizes.append(piece.numel)
            indices.append(piece.param)
            end = max(end, piece.offset + piece.numel)
        sizes.append(self.layout.chunk_numel - end)
        indices.append(-1)
        return sizes, indices

    @property
    def resident_nbytes(self) -> int:
        return self._storage.nbytes()

    def collect(self, leaves: Sequence[nn.Parameter]) -> None:
        """Move the leaves' gradients here, adding to what waits; frees them.

        A parameter without a gradient contributes zeros.
        """
        if self._placement.num_ranks == 1:
            self._collect_local(leaves)
            return
        gradients = self._take(leaves)
        if self.holds_sum:
            self._add(gradients)
        else:
            self._storage.resize_(self._nbytes)
            pack_(self.buffer, gradients, self._segments)
        self.holds_sum = True

    def _take(self, leaves: Sequence[nn.Parameter]) -> list[torch.Tensor]:
        """The gradients of the trainable leaves, noted, and no longer theirs."""
        gradients = []
        for index in self.layout.trainable:
            leaf = leaves[index]
            gradient = leaf.grad
            if gradient is None:
                gradients.append(_MISSING)
                continue
            leaf.grad = None
            self.present.add(index)
            if gradient.layout is not torch.strided:
                gradient = gradient.to_dense()  # Embeddings may give sparse ones.
            gradients.append(gradient)
        return gradients

    def _add(self, gradients: Sequence[torch.Tensor]) -> None:
        targets, sources = [], []
        for index, cut, target in self._places:
            gradient = gradients[self._source[index]]
            if gradient is not _MISSING:
                targets.append(target)
                sources.append(gradient if cut is None else gradient.reshape(-1)[cut])
        if targets:
            torch._foreach_add_(targets, sources)

    def _collect_local(self, leaves: Sequence[nn.Parameter]) -> None:
        for index, gradient in zip(self.layout.trainable, self._take(leaves), strict=True):
            if gradient is not _MISSING:
                gradient = gradient.to(self._dtype)
                waiting = self._local.get(index)
                self._local[index] = gradient if waiting is None else waiting + gradient
        self.holds_sum = True

    def free_buffer(self) -> None:
        """Free the memory of what was reduced; safe from another thread, and twice."""
        self._storage.resize_(0)

    def release(self) -> None:
        """The reduction is done, or the gradients are given up: ready for the next ones."""
        self.free_buffer()
        self._local.clear()
        self.present = set()
        self.holds_sum = False

    def deliver(self, chunk: torch.Tensor | None, present: set[int]) -> None:
        """Add this rank's part of the reduced gradients to `.grad` of the sharded parameters.

        Args:
            chunk: [chunk_numel], any floating dtype; None on one rank alone.
            present: parameters that had a gradient on any rank; others keep what they have.
        """
        for index, gradient in self._pieces_of(chunk):
            if index < 0 or index not in present:
                continue
            sharded = self._sharded_params[index]
            if sharded.grad is None:
                sharded.grad = gradient
            else:
                sharded.grad.add_(gradient)

    def _pieces_of(self, chunk: torch.Tensor | None) -> Iterator[tuple[int, torch.Tensor]]:
        dtype = self._sharded_params[0].dtype
        if chunk is None:
            for index, gradient in self._local.items():
                yield index, gradient.reshape(-1).to(dtype)
            return
        parts = chunk.to(dtype).split_with_sizes(self._split_sizes)
        yield from zip(self._split_indices, parts, strict=True)
