"""GradientBuffer: gradients of one flat parameter, from unsharded to sharded parameters.

    full .grad --collect--> buffer --first hop--> chunk --further hops--> chunk --parts--> .grad
                              |                     |
     micro-batches add up:    `sum`, or           `shard_sum`          (`no_sync`, gradient_sums.py)

Each gradient is copied once, and the buffer's storage exists only from `collect` until the
reduction is done. `.grad` is written only when the pass has ended (step/reducer.py).

Note [Gradients travel as they were computed]
    On gloo the engine adds up what arrives, in float32. So gradients in 16 bits that no sum waits
    for are sent as they are, also if the reduce dtype is float32: the receiver casts them, instead
    of the sender, to the same bits, and half as many bytes are held and sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from operator import itemgetter

import torch
from torch import nn

from layerzero.flat.buffer import Buffer, BufferEvents
from layerzero.flat.host_memory import HostMemory
from layerzero.flat.layout import FlatLayout
from layerzero.flat.parameter_hooks import STEPPED_BY_TORCH
from layerzero.flat.parameter_info import info_of
from layerzero.flat.placement import Placement, sum_dtype
from layerzero.ops import Segments, pack_

Gradient = tuple[nn.Parameter, torch.Tensor]
"""A sharded parameter, and what this pass adds to its `.grad`."""
_STRIDED = torch.strided
MISSING = torch.empty(0, device="cpu")
"""Stands for a missing gradient; `pack_` fills its place with zeros."""


class GradientBuffer:
    """Collects unsharded gradients of one flat parameter, and cuts this rank's parts from the
    reduced ones, which `Delivery` adds to `.grad` (step/reducer.py)."""

    present: set[int]
    """Indices of parameters that had a gradient on this rank since the last reduction."""
    holds_sum = False
    """Whether unsharded gradients wait on the device."""
    sums_on: HostMemory | None
    """Host memory for gradients that wait between micro-batches; None: they stay on the device."""
    host_sum: torch.Tensor | None = None
    """Sum that waits on the host if `sums_on` is set: unsharded, or a first hop's chunk."""
    shard_sum: torch.Tensor | None = None
    """[chunk after the first hop], float32 at least: sum of earlier micro-batches."""
    segments: Segments
    """Table by which `pack_` fills the buffer."""
    trainable: tuple[int, ...] = ()
    """Indices of the parameters whose gradients are reduced, rising; others' places are zeros."""

    def __init__(
        self,
        layout: FlatLayout,
        shapes: Sequence[torch.Size],
        placement: Placement,
        computed_dtype: torch.dtype,
        dtype: torch.dtype,
        device: torch.device,
        sharded_params: list[nn.Parameter],
        events: BufferEvents,
        sums_on: HostMemory | None = None,
    ) -> None:
        """
        Args:
            shapes: shapes of the gradients in the buffer; of DTensors, the local ones.
            computed_dtype: dtype in which backward computes them; `dtype`: reduce dtype.
            sums_on: host memory for sums of micro-batches; None: they stay on `device`.
        """
        self.layout = layout
        self._shapes = shapes
        self._placement = placement
        self.dtype, self.sum_dtype = dtype, sum_dtype(dtype)
        self.device = device
        groups = placement.reduce_groups
        on_gloo = device.type == "cpu" and bool(groups) and groups[0].backend == "gloo"
        is_narrow = on_gloo and dtype == torch.float32 and computed_dtype.itemsize == 2
        self._sent_dtype = computed_dtype if is_narrow else dtype
        self._sharded_params = sharded_params
        self.sums_on = sums_on
        self.present = set()
        self._splits = [
            (index, split)
            for index, sharded in enumerate(sharded_params)
            if (split := info_of(sharded).tensor_parallel) is not None
        ]
        pairs = enumerate(zip(layout.starts, layout.numels, strict=True))
        rows = ((index, 0, start, numel) for index, (start, numel) in pairs)
        self.segments = Segments.build(rows, layout.padded_numel)
        ranges = layout.shard_ranges(placement.main_shard_index)
        self._starts = {owned.param: owned.offset for owned in ranges if owned.numel}
        shards = [sharded_params[index] for index in self._starts]
        self._views = [each.shape for each in shards], [each.stride() for each in shards]
        # A tensor made in inference mode could not be written in place outside it.
        with torch.inference_mode(False):
            # Without elements on this rank, like most of a unit's on many ranks: made once.
            self._empty = [
                (index, torch.empty_like(sharded, requires_grad=False))
                for index, sharded in enumerate(sharded_params)
                if index not in self._starts
            ]
        self._events = events
        self.use_buffers(Buffer)

    def use_buffers(self, make_buffer: Callable[[torch.Tensor, BufferEvents], Buffer]) -> None:
        """Let `make_buffer` make the buffers that allocate and free tensors: perhaps in an arena.
        Between passes, while nothing waits."""
        self._make_buffer = make_buffer
        self._outgoing = self._sent = self.area(self._sent_dtype)
        self._sum = self.area(self.sum_dtype)

    def area(self, dtype: torch.dtype) -> Buffer:
        """A buffer for all gradients of the flat parameter, without memory."""
        with torch.inference_mode(False):
            flat = torch.empty(self.layout.padded_numel, dtype=dtype, device=self.device)
        area = self._make_buffer(flat, self._events)
        area.free()
        return area

    @property
    def buffer(self) -> torch.Tensor:
        """[padded_numel]: the reduction's input, once collected."""
        return self._sent.tensor

    @property
    def buffers(self) -> list[torch.Tensor]:
        """Tensors that are allocated while gradients wait or are reduced."""
        return [self._outgoing.tensor, self._sum.tensor]

    @property
    def in_flight_nbytes(self) -> int:
        """Bytes that a reduction under way holds at most, apart from its result."""
        if self.sum_is_buffer:
            return self.sum_nbytes
        return self._outgoing.nbytes + (0 if self.sums_on is None else self.sum_nbytes)

    @property
    def is_waiting(self) -> bool:
        """Whether gradients of micro-batches have added up and are not reduced yet."""
        return self.holds_sum or self.shard_sum is not None or self.host_sum is not None

    @property
    def is_waiting_after_first_hop(self) -> bool:
        return self.shard_sum is not None or self.host_sum is not None

    @property
    def sum(self) -> torch.Tensor:
        """[padded_numel], float32 at least: gradients add up here unsharded."""
        return self._sum.tensor

    @property
    def sum_nbytes(self) -> int:
        return self.layout.padded_numel * self.sum_dtype.itemsize

    @property
    def sum_is_buffer(self) -> bool:
        return self.sum_dtype == self.dtype

    def collect(
        self,
        unsharded_params: Sequence[nn.Parameter],
        keep_accumulating: bool = False,
        in_reduce_dtype: bool = False,
    ) -> None:
        """Move the leaves' gradients here, add them to those that wait unsharded, and free them.

        A parameter without a gradient contributes zeros.

        Args:
            keep_accumulating: leave the sum in `sum`, to which more gradients will be added; else
                it ends in `buffer`, ready to be sent.
            in_reduce_dtype: against Note [Gradients travel as they were computed].
        """
        gradients = self._take(unsharded_params)
        in_sum = self.holds_sum or keep_accumulating or (in_reduce_dtype and self.sum_is_buffer)
        if self.holds_sum:
            self.add_to_sum(gradients, keep_accumulating)
        else:
            area = self._sum if in_sum else self._outgoing
            area.allocate()
            pack_(area.tensor, gradients, self.segments)
        self._sent = self._sum if in_sum and self.sum_is_buffer else self._outgoing
        self.holds_sum = True

    def add_to_sum(self, gradients: list[torch.Tensor], keep_accumulating: bool) -> None:
        """Add the gradients of a micro-batch to those that wait in `sum`; as `collect`.
        `GradientSums` implements it."""
        raise NotImplementedError

    def _take(self, unsharded_params: Sequence[nn.Parameter]) -> list[torch.Tensor]:
        """Take the gradients of the trainable leaves: record them in `present`, clear `.grad`.

        One that was frozen since forward has none: torch adds nothing to its `.grad` either, and
        what earlier micro-batches added stays. Of DTensors, take the local tensors; this is
        collective over tensor-parallel ranks if a gradient's placements are not those of its
        parameter.
        """
        gradients = [MISSING] * len(unsharded_params)
        for index in self.trainable:
            unsharded = unsharded_params[index]
            gradient = unsharded.grad
            if gradient is None:
                continue
            unsharded.grad = None
            self.present.add(index)
            if gradient.layout is not _STRIDED:
                gradient = gradient.to_dense()  # `nn.Embedding(sparse=True)` makes sparse ones.
            gradients[index] = gradient
        for index, split in self._splits:
            if gradients[index] is not MISSING:
                sharded = self._sharded_params[index]
                gradients[index] = split.localize(gradients[index], info_of(sharded).fqn)
        return gradients

    def free_buffer(self) -> None:
        """Free the reduction's input. May be called from another thread, and twice."""
        self._sent.free()

    def release_buffer(self) -> None:
        """Free both buffers; gradients that wait are in `shard_sum` or `host_sum` by now."""
        self.free_buffer()
        if not self.sum_is_buffer:
            self._sum.free()
        self.holds_sum = False

    def release(self) -> None:
        """Free what a reduction has read; forget the sum sent, which `undo` restores."""
        self.release_buffer()
        self.shard_sum = self.host_sum = None
        self.present = set()

    def parts(
        self, chunk: torch.Tensor, present: set[int], plain: list[Gradient]
    ) -> list[Gradient]:
        """Split off this rank's parts of the reduced gradients, in the sharded parameters' dtype.

        Args:
            chunk: [chunk_numel], any floating dtype.
            present: parameters that had a gradient on any rank; there are no parts of others.
            plain: gets the parts of parameters without hooks.

        Returns:
            Those of parameters with hooks, in the same order on every rank; see
            `accumulate_with_hooks`.
        """
        hooked: list[tuple[int, torch.Tensor]] = []
        dtype = self._sharded_params[0].dtype
        for index, gradient in self.pieces(chunk if chunk.dtype == dtype else chunk.to(dtype)):
            if index not in present:
                continue
            sharded = self._sharded_params[index]
            if (
                sharded._post_accumulate_grad_hooks
                or sharded._backward_hooks
                or STEPPED_BY_TORCH in sharded.__dict__
            ):
                hooked.append((index, gradient))
            else:
                plain.append((sharded, gradient))
        if hooked:
            hooked.sort(key=itemgetter(0))  # Parts come in the order of this rank's chunk.
        return [(self._sharded_params[index], gradient) for index, gradient in hooked]

    def pieces(self, chunk: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """(index of the parameter, view of this rank's part of its gradient, shaped like it)."""
        first = chunk.storage_offset()
        starts = [first + start for start in self._starts.values()]
        views = map(chunk.as_strided, *self._views, starts)
        return chain(zip(self._starts, views, strict=True), self._empty)
