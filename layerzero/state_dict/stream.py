"""Streams full tensors, gathered a bucket at a time, for export and for full state dicts.

    bucket 1: gather ====|                    a bucket: one flat parameter, or as many neighbouring
    bucket 2:      gather ====| yield 1 ...   parameters of it as fit into half the bytes
    bucket 3:            gather ====| yield 2 ...

Two buckets exist at a time: the one whose tensors are in use, and the next one being gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from layerzero.comm.collectives import all_gather, broadcast
from layerzero.comm.pending import Pending
from layerzero.comm.streams import Waitable
from layerzero.config import parse_nbytes
from layerzero.state_dict.names import Names, named_buffers
from layerzero.state_dict.owners import unit_of
from layerzero.state_dict.preconditions import root_state_of
from layerzero.step.handle import FlatParamHandle
from layerzero.step.operations import remembers_failure
from layerzero.step.root import RootState, root_of


@dataclass(frozen=True)
class FlatSource:
    """A flat tensor in the layout of a handle, sharded like its main shard."""

    handle: FlatParamHandle
    label: str
    """Name in messages."""
    dtype: torch.dtype
    """Dtype of the full tensors."""
    shard: Callable[[], torch.Tensor]
    """Returns this rank's shard, [shard_numel]; called when its gather begins."""
    present: Sequence[int]
    """Indices of the handle's parameters to yield."""


@dataclass(frozen=True)
class _Bucket:
    """Parameters `indices` of a source, at elements [start, stop) of its flat tensor."""

    source: FlatSource
    indices: Sequence[int]
    start: int
    stop: int


def stream_full(
    model: nn.Module,
    bucket_bytes: int | str = "1GB",
    *,
    dtype: torch.dtype | None = None,
    only: Container[str] | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, full tensor) of every parameter and persistent buffer, on every rank.

    For passing weights to an inference engine or writing them to a file. Collective over the ranks
    that share the model: all must take every item, and none may train meanwhile. The next bucket is
    gathered while the tensors of one are in use. Does not block the host on a device with streams.

    Args:
        model: a ZeRO3 module, between steps.
        bucket_bytes: bound on the memory of full tensors, an int or a string such as "512MB". It
            holds if the caller drops each tensor before taking the next, since tensors are views of
            the bucket. At least twice the largest parameter is needed.
        dtype: dtype to cast floating-point parameters to before gathering; None: that of the main
            shards. Buffers are not cast.
        only: names to yield, the same on all ranks; None: all. Flat parameters with none of these
            names are not gathered.

    Yields:
        Names as in `named_parameters()`, a tied parameter under its first name, with tensors of the
        original shapes on the model's device, without gradient. Buffers come last.

    Raises:
        RuntimeError: the model is in backward.
        ValueError: a bad argument.
        CollectiveError: a rank died, or did not take part within the timeout.
    """
    nbytes = parse_nbytes(bucket_bytes, "bucket_bytes")
    root_state_of(model, "stream_full", is_collective=True)
    return _stream_model(model, nbytes, dtype, only)


def _stream_model(
    model: nn.Module,
    nbytes: int,
    dtype: torch.dtype | None,
    only: Container[str] | None,
) -> Iterator[tuple[str, torch.Tensor]]:
    names = Names(model)

    def name_of(parameter: torch.Tensor) -> str:
        found = names.of(parameter)
        assert found is not None, "the handles belong to the model"
        return found[0]

    def is_wanted(name: str) -> bool:
        return only is None or name in only

    sources = []
    for handle in names.handles:
        of_all = source_of_weights(handle, dtype)
        wanted = [i for i in of_all.present if is_wanted(name_of(handle.sharded_params[i]))]
        sources.append(replace(of_all, present=wanted))
    yield from (
        (name_of(source.handle.sharded_params[index]), full)
        for source, index, full in stream_sources(sources, nbytes)
    )
    sharded = {id(p) for handle in names.handles for p in handle.sharded_params}
    for parameter, found in names.parameters:
        if id(parameter) not in sharded and is_wanted(found[0]):
            yield found[0], parameter.detach()
    for buffer, found in named_buffers(model):
        if is_wanted(found[0]):
            yield found[0], buffer.detach()


def source_of_weights(handle: FlatParamHandle, dtype: torch.dtype | None = None) -> FlatSource:
    """The main shard of a handle; cast to `dtype`, if given and if the shard is floating-point."""
    own = handle.main_shard.dtype
    target = dtype if dtype is not None and own.is_floating_point else own

    def shard() -> torch.Tensor:
        handle.reset_sharded_params(handle.fqns[0])
        return handle.main_shard.detach().to(target)

    return FlatSource(handle, handle.fqns[0], target, shard, range(len(handle.fqns)))


def stream_sources(
    sources: Sequence[FlatSource], nbytes: int
) -> Iterator[tuple[FlatSource, int, torch.Tensor]]:
    """Yield (source, parameter index, full tensor), gathering one bucket ahead. Collective."""
    buckets = [bucket for source in sources for bucket in _cut(source, nbytes // 2)]
    coming = _gather(_root_of(buckets[0]), buckets[0]) if buckets else None
    try:
        for number, bucket in enumerate(buckets):
            assert coming is not None
            full, work = coming
            following = buckets[number + 1] if number + 1 < len(buckets) else None
            coming = None if following is None else _gather(_root_of(following), following)
            work.wait()
            state = _root_of(bucket)
            handle = bucket.source.handle
            for index in bucket.indices:
                start = handle.layout.starts[index] - bucket.start
                view = full[start : start + handle.layout.numels[index]]
                view = view.view(handle.shapes[index])
                split = handle.splits[index]
                if split is not None:
                    view = split.wrap(view).full_tensor()  # Collective over the mesh.
                yield bucket.source, index, view
                del view
            state.context.before_free()
            del full
    finally:
        if coming is not None:
            coming[1].wait()  # Stopped early: the gather must not write to freed memory.
            _root_of(buckets[0]).context.before_free()


def _root_of(bucket: _Bucket) -> RootState:
    unit = unit_of(bucket.source.handle.sharded_params[0])
    assert unit is not None, "the model of the sources exists"
    return root_of(unit)


def _cut(source: FlatSource, nbytes: int) -> Iterator[_Bucket]:
    layout, width = source.handle.layout, source.dtype.itemsize
    if layout.padded_numel * width <= nbytes:
        if source.present:
            yield _Bucket(source, source.present, 0, layout.padded_numel)
        return
    group: list[int] = []
    for index in source.present:
        stop = layout.starts[index] + layout.numels[index]
        if group and (stop - layout.starts[group[0]]) * width > nbytes:
            yield _neighbours(source, group)
            group = []
        group.append(index)
    if group:
        yield _neighbours(source, group)


def _neighbours(source: FlatSource, group: list[int]) -> _Bucket:
    layout = source.handle.layout
    stop = layout.starts[group[-1]] + layout.numels[group[-1]]
    return _Bucket(source, tuple(group), layout.starts[group[0]], stop)


@remembers_failure
def _gather(state: RootState, bucket: _Bucket) -> tuple[torch.Tensor, Waitable]:
    """Start gathering a bucket; returns the flat tensor of its range, and a handle to wait for."""
    source, placement = bucket.source, bucket.source.handle.placement
    # After writes of what is read here, and after reads of memory that is reused.
    event = state.streams.record_compute_event()
    with state.streams.unshard as stream:
        stream.wait(event)
        shard = source.shard().to(state.device, non_blocking=True)
        full = shard.new_empty(bucket.stop - bucket.start)
        if bucket.stop - bucket.start != source.handle.layout.padded_numel:
            return full, stream.enqueue_wait(_Several(_broadcasts(state, bucket, shard, full)))
        pending: list[Pending] = []
        for group in placement.owner_groups:
            for earlier in pending:
                earlier.wait()
            is_last = group is placement.owner_groups[-1]
            gathered = full if is_last else shard.new_empty(shard.numel() * group.size)
            operation = state.operations.next("stream", source.label, group)
            pending = [all_gather(gathered, shard, group, operation)]
            shard = gathered
        if not placement.owner_groups:
            full.copy_(shard)
        return full, stream.enqueue_wait(_Several(pending))


def _broadcasts(
    state: RootState, bucket: _Bucket, shard: torch.Tensor, full: torch.Tensor
) -> list[Pending]:
    """Every owner of a part of the bucket broadcasts it, to its outer peers first."""
    placement, numel = bucket.source.handle.placement, shard.numel()
    pending = []
    for owner in range(bucket.start // numel, -(-bucket.stop // numel)):
        begin = max(bucket.start, owner * numel)
        end = min(bucket.stop, (owner + 1) * numel)
        part = full[begin - bucket.start : end - bucket.start]
        if owner == placement.main_shard_index:
            part.copy_(shard[begin - owner * numel : end - owner * numel])
        coordinates = _coordinates(bucket.source.handle, owner)
        hops = list(zip(placement.owner_groups, coordinates, strict=True))
        for number, (group, place) in enumerate(hops):
            is_last = number + 1 == len(hops)
            operation = state.operations.next("stream", bucket.source.label, group)
            if not is_last and placement.shard_group.rank != coordinates[-1]:
                continue  # Only the owner's outer peers take part in the first hop.
            sent = broadcast(part, group, operation, place)
            if is_last:
                pending.append(sent)
            else:
                sent.wait()
    return pending


def _coordinates(handle: FlatParamHandle, owner: int) -> tuple[int, ...]:
    """The owner's rank in each of the owner groups; see placement.py."""
    placement = handle.placement
    sizes = [group.size for group in placement.owner_groups]
    if len(sizes) == 2:
        inner, outer = divmod(owner, sizes[0])
        return outer, inner
    return (owner,) * len(sizes)


class _Several:
    """Several collectives to wait for together."""

    def __init__(self, pending: Sequence[Pending]) -> None:
        self._pending = pending

    def wait(self) -> None:
        for each in self._pending:
            each.wait()
