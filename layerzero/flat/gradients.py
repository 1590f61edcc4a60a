"""GradientBuffer: gradients of one flat parameter, from unsharded to sharded parameters.

    full .grad --collect--> buffer --first hop--> chunk --further hops--> chunk --parts--> .grad
                              |                     |
     micro-batches add up:  `_sum`, or         `shard_sum`                       (`no_sync`)

Note [A pass adds only when it is complete]
    What earlier micro-batches left is not written before the pass that adds to it has ended, so
    that one that fails leaves it as it was. Unsharded, a micro-batch's gradients are held until
    then, in the dtype in which backward computed them; where the sum is sent, it is copied first.
    Sharded and on the host, each micro-batch writes a new sum. `keep` ends a pass, `undo` takes it
    back.

Each gradient is copied once, and the buffer's storage exists only from `collect` until the
reduction is done. Micro-batches without synchronization add up in one of two places, in float32 at
least: unsharded, before anything is sent, or sharded, after the first hop of the reduction. `.grad`
is written only when the pass has ended (step/reducer.py).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from layerzero.flat.host_memory import HostMemory
from layerzero.flat.huge_pages import is_worth_huge_pages, prefer_huge_pages
from layerzero.flat.layout import FlatLayout, GradientLayout, ShardRange
from layerzero.flat.parameter_info import get_info
from layerzero.flat.placement import Placement, sum_dtype
from layerzero.flat.tensor_parallel import TensorParallelSplit
from layerzero.ops import Segments, pack_

if TYPE_CHECKING:
    from layerzero.flat.pair_input import PairInput

Gradient = tuple[nn.Parameter, torch.Tensor]
"""A sharded parameter, and what this pass adds to its `.grad`."""
_MISSING = torch.empty(0)
"""Stands for a missing gradient; `pack_` fills its place with zeros."""


class _Earlier(NamedTuple):
    """Sums of completed micro-batches; see Note [A pass adds only when it is complete]."""

    area: _Area | None
    """The area that holds the unsharded sum, if any."""
    holds_sum: bool
    local: dict[int, torch.Tensor]
    shard_sum: torch.Tensor | None
    host_sum: torch.Tensor | None
    present: set[int]


_NOTHING = _Earlier(None, False, {}, None, None, set())


class GradientBuffer:
    """Collects unsharded gradients of one flat parameter, and adds the reduced ones to `.grad`."""

    present: set[int]
    """Indices of parameters that had a gradient on this rank since the last reduction."""
    holds_sum: bool
    """Whether unsharded gradients wait on the device (in a group of one rank: in `_local`)."""
    sums_on: HostMemory | None
    """Host memory for gradients that wait between micro-batches; None: they stay on the device."""
    host_sum: torch.Tensor | None
    """Sum that waits on the host if `sums_on` is set: unsharded, or a first hop's chunk."""
    shard_sum: torch.Tensor | None
    """[chunk after the first hop], float32 at least: sum of earlier micro-batches."""
    pair: PairInput | None
    """Takes the place of `buffer` where nothing waits to be added to, between two ranks on gloo."""

    def __init__(
        self,
        layout: FlatLayout,
        shapes: Sequence[torch.Size],
        placement: Placement,
        dtype: torch.dtype,
        device: torch.device,
        sharded_params: list[nn.Parameter],
        splits: Mapping[int, TensorParallelSplit],
        sums_on: HostMemory | None = None,
    ) -> None:
        """
        Args:
            shapes: shapes of the gradients in the buffer; of DTensors, the local ones.
            dtype: reduce dtype, in which gradients are sent.
            splits: how parameters that are DTensors are split, by index.
            sums_on: host memory for sums of micro-batches; None: they stay on `device`.
        """
        self._layout = layout
        self._shapes = shapes
        self._placement = placement
        self._dtype = dtype
        self.device = device
        self._sharded_params = sharded_params
        self._are_shaped = any(each.ndim > 1 for each in sharded_params)
        self._splits = splits
        self.sums_on = sums_on
        self._local: dict[int, torch.Tensor] = {}
        self.present = set()
        self.holds_sum = False
        self.shard_sum = None
        self.host_sum = None
        self.pair: PairInput | None = None
        self._may_pair = False
        self._earlier = _NOTHING
        self._pending: list[list[torch.Tensor]] = []
        """Gradients to add to the sum once the pass is complete."""
        self.set_trainable(range(len(shapes)))

    def set_trainable(self, indices: Sequence[int]) -> None:
        """Lay the buffer out for these parameters. Between passes.

        Sums of earlier micro-batches move; `indices` then contain those that they are of.

        Raises:
            RuntimeError: such sums are on the host.
        """
        if self.host_sum is not None:
            raise RuntimeError(
                "parameters were unfrozen while gradients of no_sync wait on the host: change "
                "requires_grad between optimizer steps, not inside an accumulation"
            )
        former, waiting = self.__dict__.get("layout"), self._earlier
        self.layout = GradientLayout.build(self._layout, indices)
        self._source = {index: place for place, index in enumerate(self.layout.trainable)}
        self._split_sources = [
            (place, index, self._splits[index])
            for index, place in self._source.items()
            if index in self._splits
        ]
        wide = sum_dtype(self._dtype)
        # A tensor made in inference mode could not be written in place outside it.
        with torch.inference_mode(False):
            self._outgoing = _Area(self, self._dtype)
            self._sum = self._outgoing if wide == self._dtype else _Area(self, wide)
        self._spare: _Area | None = None
        """Like `_sum`, made when a sum is first copied."""
        self._segments = Segments.build(
            ((self._source[p.param], p.start, p.offset, p.numel) for p in self.layout.segments),
            self.layout.numel,
        )
        self._whole = Segments.concatenate([self.layout.numel])
        self._plan_pair()
        self._split_sizes, self._split_indices = self._plan_split()
        self._split_shapes = [
            self._sharded_params[index].shape if index >= 0 else (size,)
            for index, size in zip(self._split_indices, self._split_sizes, strict=True)
        ]
        if former is not None:
            self._move_sums(former, waiting)

    def _move_sums(self, former: GradientLayout, waiting: _Earlier) -> None:
        """Move the sums of earlier micro-batches from the former layout to this one."""
        area, shard_sum = waiting.area, waiting.shard_sum
        if area is not None:
            self._sum.allocate()
            self._move(area.tensor, former, self._sum.tensor.zero_())
            area.free()
            area = self._sum
        if shard_sum is not None:
            num_pieces = former.numel // shard_sum.numel()
            self.shard_sum = shard_sum.new_zeros(self.layout.numel // num_pieces)
            self._move(shard_sum, former, self.shard_sum)
            shard_sum = self.shard_sum
        self._earlier = waiting._replace(area=area, shard_sum=shard_sum)

    def _move(self, source: torch.Tensor, former: GradientLayout, target: torch.Tensor) -> None:
        """Copy what both have of each gradient; they lie in the whole buffers of two layouts."""
        places: dict[int, list[ShardRange]] = {}
        for new in self._runs_in(target, self.layout):
            places.setdefault(new.param, []).append(new)
        for old in self._runs_in(source, former):
            for new in places.get(old.param, ()):
                first, last = max(old.start, new.start), min(old.stop, new.stop)
                if first < last:
                    values = source[old.offset - old.start + first :][: last - first]
                    target[new.offset - new.start + first :][: last - first].copy_(values)

    def _runs_in(self, flat: torch.Tensor, layout: GradientLayout) -> Iterator[ShardRange]:
        """Parts of gradients in a sum: the whole buffer, or the chunk that a first hop leaves,
        which has the chunks of one or more main shards in their order."""
        num_pieces = layout.numel // flat.numel()
        piece = self._placement.main_shard_index * num_pieces // layout.num_chunks
        return layout.runs_in(piece * flat.numel() if num_pieces > 1 else 0, flat.numel())

    def keep_own_chunk_apart(self, apart: bool = True) -> None:
        """Pack for `reduce_with_peer`, if chunks are large; only between two ranks on gloo."""
        self._may_pair = apart
        self._plan_pair()

    def _plan_pair(self) -> None:
        numel, self.pair = self.layout.chunk_numel, None
        # In low precision the sum needs memory of its own, in a wider dtype.
        if not (self._may_pair and self.sum_is_buffer and numel % 2 == 0):
            return
        from layerzero.flat import pair_input

        if numel * self._dtype.itemsize >= pair_input.LEAST_NBYTES:
            args = self.layout, self._placement.shard_group.rank, self._dtype, self.device
            with torch.inference_mode(False):
                self.pair = pair_input.PairInput(*args, self._source)

    def place(
        self, buffer: torch.Tensor, segment: ShardRange
    ) -> tuple[int, slice | None, torch.Tensor]:
        """Return (parameter index, slice of its flattened gradient, target view in `buffer`).

        The slice is None for a whole gradient, and the target then has the gradient's shape.
        """
        target = buffer[segment.offset : segment.offset + segment.numel]
        if segment.numel == self._layout.numels[segment.param]:
            return segment.param, None, target.view(self._shapes[segment.param])
        return segment.param, slice(segment.start, segment.stop), target

    def _plan_split(self) -> tuple[list[int], list[int]]:
        """Sizes of the gradients and gaps in this rank's chunk; parameter of each, -1: a gap."""
        sizes, indices, end = [], [], 0
        own = self.layout.chunk(self._placement.main_shard_index)
        for owned in sorted(own, key=lambda owned: owned.offset):
            if owned.numel and owned.offset > end:
                sizes.append(owned.offset - end)
                indices.append(-1)
            sizes.append(owned.numel)
            indices.append(owned.param)
            end = max(end, owned.offset + owned.numel)
        sizes.append(self.layout.chunk_numel - end)
        indices.append(-1)
        return sizes, indices

    @property
    def buffer(self) -> torch.Tensor:
        """[numel of `layout`] in the reduce dtype: the reduction's input, once collected."""
        return self._outgoing.tensor

    @property
    def buffers(self) -> list[torch.Tensor]:
        """Tensors that are allocated while gradients wait or are reduced."""
        pair = [] if self.pair is None else [self.pair.memory]
        return [self._outgoing.tensor, self._sum.tensor, *pair]

    @property
    def buffer_nbytes(self) -> int:
        """Bytes of `buffer` while it is allocated."""
        return self._outgoing.nbytes

    @property
    def sum_nbytes(self) -> int:
        """Bytes of an unsharded sum over micro-batches while it is allocated."""
        return self._sum.nbytes

    @property
    def in_flight_nbytes(self) -> int:
        """Bytes that a reduction under way holds at most, apart from its result."""
        waits_on_host = self.sums_on is not None and not self.sum_is_buffer
        return self.buffer_nbytes + (self.sum_nbytes if waits_on_host else 0)

    @property
    def resident_nbytes(self) -> int:
        areas = {id(area): area for area in (self._outgoing, self._sum, self._earlier.area) if area}
        sums = {id(s): s for s in (self.shard_sum, self._earlier.shard_sum) if s is not None}
        pending = sum(gradient.nbytes for gradients in self._pending for gradient in gradients)
        in_areas = sum(area.storage.nbytes() for area in areas.values())
        in_areas += 0 if self.pair is None else self.pair.resident_nbytes
        return in_areas + pending + sum(each.nbytes for each in sums.values())

    @property
    def is_waiting(self) -> bool:
        """Whether gradients of micro-batches have added up and are not reduced yet."""
        return self.holds_sum or self.shard_sum is not None or self.host_sum is not None

    @property
    def is_waiting_after_first_hop(self) -> bool:
        return self.shard_sum is not None or self.host_sum is not None

    @property
    def sum(self) -> torch.Tensor:
        """[numel of `layout`], float32 at least: gradients add up here unsharded."""
        return self._sum.tensor

    @property
    def sum_is_buffer(self) -> bool:
        return self._sum is self._outgoing

    def fill_buffer(self) -> None:
        """Cast the sum into the buffer, which must be allocated."""
        if not self.sum_is_buffer:
            pack_(self._outgoing.tensor, [self._sum.tensor], self._whole)

    def allocate_buffer(self) -> None:
        """Allocate `buffer`; `collect` did if it holds the sum."""
        # To resize a storage on a device to the size it has allocates again, and copies.
        if not self.sum_is_buffer:
            self._outgoing.allocate()

    def collect(
        self, unsharded_params: Sequence[nn.Parameter], keep_accumulating: bool = False
    ) -> None:
        """Move the leaves' gradients here, add them to those that wait unsharded, and free them.

        A parameter without a gradient contributes zeros.

        Args:
            keep_accumulating: leave the sum in `sum`, to which more gradients will be added; else
                it ends in `buffer` or in `pair`, ready to be sent.
        """
        if self._placement.num_ranks == 1:
            self._collect_local(unsharded_params)
            return
        gradients = self._take(unsharded_params)
        if not self.holds_sum and self.pair is not None and not keep_accumulating:
            self.pair.fill(gradients)
            self.holds_sum = True
            return
        if not self.holds_sum:
            area = self._sum if keep_accumulating else self._outgoing
            area.allocate()
            pack_(area.tensor, gradients, self._segments)
            self.holds_sum = True
            return
        if self._sum is self._earlier.area:
            if keep_accumulating:
                self._pending.append(gradients)
                return
            self._copy_sum()
        targets, sources = self._pairs(gradients)
        if targets:
            torch._foreach_add_(targets, sources)
        if not keep_accumulating and not self.sum_is_buffer:
            self.allocate_buffer()
            self.fill_buffer()
            self._sum.free()

    def _copy_sum(self) -> None:
        """Copy the sum; the pass adds to the copy."""
        total = self._spare
        if total is None:
            with torch.inference_mode(False):
                total = _Area(self, self._sum.tensor.dtype)
        self._spare = None
        total.allocate()
        total.tensor.copy_(self._sum.tensor)
        if self.sum_is_buffer:
            self._outgoing = total
        self._sum = total

    def pending_additions(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Parts of the sum, and the gradients to add to them before `keep`."""
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for gradients in self._pending:
            more = self._pairs(gradients)
            targets += more[0]
            sources += more[1]
        return targets, sources

    def keep(self) -> None:
        """Keep the sums of a complete pass, and drop earlier ones."""
        self._pending = []
        area = self._sum if self.holds_sum and self._placement.num_ranks > 1 else None
        former = self._earlier.area
        if former is not None and former is not self._sum:
            former.free()
            self._spare = former
        if self.is_waiting:
            sums = self.shard_sum, self.host_sum
            local, present = dict(self._local), set(self.present)
            self._earlier = _Earlier(area, self.holds_sum, local, *sums, present)
        else:
            self._earlier = _NOTHING

    def undo(self) -> None:
        """Return to the state after the last complete pass. No reduction may be under way."""
        before = self._earlier
        self._pending = []
        if self.pair is not None:
            self.pair.drop()
        if self._sum is not before.area:
            self._outgoing.free()
            self._sum.free()
            if before.area is not None:
                self._spare = self._sum
                if self.sum_is_buffer:
                    self._outgoing = before.area
                self._sum = before.area
        elif not self.sum_is_buffer:
            self._outgoing.free()
        self.holds_sum, self._local = before.holds_sum, dict(before.local)
        self.shard_sum, self.host_sum = before.shard_sum, before.host_sum
        self.present = set(before.present)

    def waiting(self, index: int) -> Iterator[tuple[int, torch.Tensor]]:
        """(start in the flattened gradient, flat view) of each part of what waits of a parameter.
        Between passes."""
        if index in self._local:
            yield 0, self._local[index].view(-1)
        flats = [self._sum.tensor] if self.holds_sum and self._placement.num_ranks > 1 else []
        flats += [each for each in (self.shard_sum, self.host_sum) if each is not None]
        for flat in flats:
            for run in self._runs_in(flat, self.layout):
                if run.param == index:
                    yield run.start, flat[run.offset : run.offset + run.numel]

    def add_waiting_to(self, own: torch.Tensor, index: int) -> None:
        """Add this rank's part of what waits of a parameter to `own`, its shard's gradient."""
        info = get_info(self._sharded_params[index])
        assert info is not None, "sharded parameters have ParameterInfo"
        for start, part in self.waiting(index):
            first, last = max(start, info.range[0]), min(start + part.numel(), info.range[1])
            if first < last:
                target = own.view(-1)[first - info.range[0] : last - info.range[0]]
                target.add_(part[first - start : last - start].to(own.device))

    def drop_waiting(self, index: int) -> None:
        """Drop what waits of a parameter. Between passes."""
        for _, part in self.waiting(index):
            part.zero_()
        self._local.pop(index, None)
        self.present.discard(index)
        self.keep()

    def forget(self) -> None:
        """Drop all gradients, those of earlier micro-batches included."""
        area, self._earlier = self._earlier.area, _NOTHING
        self.undo()
        if area is not None:
            area.free()

    def _take(self, unsharded_params: Sequence[nn.Parameter]) -> list[torch.Tensor]:
        """Take the gradients of the trainable leaves: record them in `present`, clear `.grad`.

        One that was frozen since forward has none: torch adds nothing to its `.grad` either, and
        what earlier micro-batches added stays. Of DTensors, take the local tensors; this is
        collective over tensor-parallel ranks if a gradient's placements are not those of its
        parameter.
        """
        gradients = []
        for index in self.layout.trainable:
            unsharded = unsharded_params[index]
            gradient = unsharded.grad
            if gradient is None:
                gradients.append(_MISSING)
                continue
            unsharded.grad = None
            if not self._sharded_params[index].requires_grad:
                gradients.append(_MISSING)
                continue
            self.present.add(index)
            if gradient.layout is not torch.strided:
                gradient = gradient.to_dense()  # `nn.Embedding(sparse=True)` makes sparse ones.
            gradients.append(gradient)
        for place, index, split in self._split_sources:
            if gradients[place] is not _MISSING:
                gradients[place] = split.localize(gradients[place], self._name_of(index))
        return gradients

    def _name_of(self, index: int) -> str:
        info = get_info(self._sharded_params[index])
        assert info is not None, "sharded parameters have ParameterInfo"
        return info.fqn

    def _pairs(
        self, gradients: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        targets, sources = [], []
        for index, cut, target in self._sum.places:
            gradient = gradients[self._source[index]]
            if gradient is not _MISSING:
                targets.append(target)
                sources.append(gradient if cut is None else gradient.reshape(-1)[cut])
        return targets, sources

    def _collect_local(self, unsharded_params: Sequence[nn.Parameter]) -> None:
        # With one rank nothing is sent, so gradients need no buffer.
        for index, gradient in zip(
            self.layout.trainable, self._take(unsharded_params), strict=True
        ):
            if gradient is not _MISSING:
                gradient = gradient.to(self._dtype)
                waiting = self._local.get(index)
                self._local[index] = gradient if waiting is None else waiting + gradient
        self.holds_sum = True

    def add_sharded(self, chunk: torch.Tensor) -> torch.Tensor:
        """Add the first hop's chunk to `shard_sum` and return that; it may share chunk's memory."""
        if self.shard_sum is None:
            self.shard_sum = chunk.to(self._sum.tensor.dtype)
        elif self.shard_sum is self._earlier.shard_sum:
            self.shard_sum = self.shard_sum + chunk
        else:
            self.shard_sum.add_(chunk)
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

    def drop_host_sum(self) -> None:
        """Forget the sum on the host, which was added to one on the device."""
        self.host_sum = None

    def free_buffer(self) -> None:
        """Free the reduction's input. May be called from another thread, and twice."""
        self._outgoing.free()
        if self.pair is not None:
            self.pair.free()

    def release_buffer(self) -> None:
        """Free both buffers; gradients that wait are in `shard_sum` or `host_sum` by now."""
        self.free_buffer()
        if not self.sum_is_buffer:
            self._sum.free()
        self.holds_sum = False

    def release(self) -> None:
        """Free what a reduction has read, and forget the sum that it sent; `undo` brings it back
        until `keep`."""
        self.release_buffer()
        self._local.clear()
        self.shard_sum = self.host_sum = None
        self.present = set()

    def parts(
        self,
        chunk: torch.Tensor | None,
        present: set[int],
        scale: float,
        stepped: Container[nn.Parameter],
        plain: list[Gradient],
    ) -> list[Gradient]:
        """Split off this rank's parts of the reduced gradients, in the sharded parameters' dtype.

        Args:
            chunk: [chunk_numel], any floating dtype; None in a group of one rank.
            present: parameters that had a gradient on any rank; there are no parts of others.
            scale: applied only in a group of one rank, where no reduction ran and scaled.
            stepped: parameters that have hooks which they do not show (`stepped_by_torch`).
            plain: gets the parts of parameters without hooks.

        Returns:
            Those of parameters with hooks, in the same order on every rank; see
            `accumulate_with_hooks`.
        """
        hooked: list[tuple[int, torch.Tensor]] = []
        for index, gradient in self.pieces(chunk, scale):
            if index < 0 or index not in present:
                continue
            sharded = self._sharded_params[index]
            if (
                sharded._post_accumulate_grad_hooks
                or sharded._backward_hooks
                or (stepped and sharded in stepped)
            ):
                hooked.append((index, gradient))
            else:
                plain.append((sharded, gradient))
        hooked.sort(key=itemgetter(0))  # Parts come in the order of this rank's chunk.
        return [(self._sharded_params[index], gradient) for index, gradient in hooked]

    def scale_parts_(self, chunk: torch.Tensor, factors: Mapping[int, float]) -> None:
        """Multiply this rank's parts of some parameters in a reduced chunk, in place."""
        parts = chunk.split_with_sizes(self._split_sizes)
        for index, part in zip(self._split_indices, parts, strict=True):
            if index in factors:
                part.mul_(factors[index])

    def reduced(self, chunk: torch.Tensor | None) -> list[torch.Tensor]:
        """The values of `pieces`, not split; rounded like these where that may overflow."""
        dtype = self._sharded_params[0].dtype
        values = [chunk] if chunk is not None else [*self._local.values()]
        return [each.to(dtype) if each.itemsize > dtype.itemsize else each for each in values]

    def pieces(
        self, chunk: torch.Tensor | None, scale: float
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """(index of the parameter, this rank's part of its gradient, in the shape of the sharded
        parameter); index -1: padding."""
        dtype, device = self._sharded_params[0].dtype, self._sharded_params[0].device
        if chunk is not None:
            parts: Iterable[torch.Tensor] = chunk.to(dtype).split_with_sizes(self._split_sizes)
            if self._are_shaped:
                parts = map(torch.Tensor.view, parts, self._split_shapes)
            return zip(self._split_indices, parts, strict=True)
        return (
            (index, scaled.reshape(self._sharded_params[index].shape).to(device, dtype))
            for index, gradient in self._local.items()
            for scaled in [gradient * scale if scale != 1.0 else gradient]
        )


class _Area:
    """A buffer for all gradients of the flat parameter, allocated only while it is in use."""

    def __init__(self, owner: GradientBuffer, dtype: torch.dtype) -> None:
        self.tensor = torch.empty(owner.layout.numel, dtype=dtype, device=owner.device)
        self.storage = self.tensor.untyped_storage()
        self.places = [owner.place(self.tensor, segment) for segment in owner.layout.segments]
        self.nbytes = self.storage.nbytes()
        self._is_large = is_worth_huge_pages(self.tensor)
        self.free()

    def allocate(self) -> None:
        self.storage.resize_(self.nbytes)
        if self._is_large:
            prefer_huge_pages(self.tensor, collapse=False)

    def free(self) -> None:
        self.storage.resize_(0)
