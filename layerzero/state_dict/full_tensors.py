"""Collects full tensors, a bucket at a time: of a model, and in place of the shards in state dicts.

    bucket 1: gather ====|                    a bucket: one flat parameter, or as many neighbouring
    bucket 2:      gather ====| yield 1 ...   parameters of it as fit into half the bytes
    bucket 3:            gather ====| yield 2 ...

Two buckets exist at a time: the one whose tensors are in use, and the next one being gathered.
"""

from __future__ import annotations

import json
import weakref
import zlib
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from layerzero.comm.collectives import all_gather, broadcast, gather_small
from layerzero.comm.pending import Pending
from layerzero.comm.streams import Waitable
from layerzero.config import parse_nbytes
from layerzero.flat.placement import Placement
from layerzero.state_dict.errors import CheckpointError
from layerzero.state_dict.names import Names, named_buffers
from layerzero.state_dict.owners import unit_of
from layerzero.state_dict.preconditions import root_state_of
from layerzero.step.handle import FlatParamHandle
from layerzero.step.operations import remembers_failure
from layerzero.step.root import RootState
from layerzero.step.root import root_of as root_of_unit

_BUCKET_NBYTES = 1 << 30
"""Bound on the full tensors that a state dict's shards are gathered in."""


class Shard(Protocol):
    """This rank's part of a parameter, or of a tensor shaped like one."""

    local: torch.Tensor
    sharded_param: weakref.ref[nn.Parameter] | None
    """Its sharded parameter; None if the shard was read from a file."""


_Shard = TypeVar("_Shard", bound=Shard)


@dataclass(frozen=True)
class FlatSource:
    """A flat tensor in the layout of a handle, sharded like its main shard."""

    root: RootState
    handle: FlatParamHandle
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

    def is_wanted(name: str) -> bool:
        return only is None or name in only

    sources = []
    for handle in names.handles:
        of_all = _source_of_weights(handle, dtype)
        wanted = [i for i in of_all.present if is_wanted(names.first(handle.sharded_params[i]))]
        sources.append(replace(of_all, present=wanted))
    yield from (
        (names.first(source.handle.sharded_params[index]), full)
        for source, index, full in _stream(sources, nbytes)
    )
    sharded = {id(p) for handle in names.handles for p in handle.sharded_params}
    for parameter, found in names.parameters:
        if id(parameter) not in sharded and is_wanted(found[0]):
            yield found[0], parameter.detach()
    for buffer, found in named_buffers(model):
        if is_wanted(found[0]):
            yield found[0], buffer.detach()


def _source_of_weights(handle: FlatParamHandle, dtype: torch.dtype | None) -> FlatSource:
    """The main shard of a handle; cast to `dtype`, if given and if the shard is floating-point."""
    own = handle.main_shard.dtype
    target = dtype if dtype is not None and own.is_floating_point else own

    def shard() -> torch.Tensor:
        handle.reset_sharded_params(handle.fqns[0])
        return handle.main_shard.detach().to(target)

    root = _root_of(handle.sharded_params[0])
    assert root is not None, "the model of the handle exists"
    return FlatSource(root, handle, target, shard, range(len(handle.fqns)))


def _root_of(sharded_param: nn.Parameter) -> RootState | None:
    unit = unit_of(sharded_param)
    return None if unit is None else root_of_unit(unit)


def _stream(
    sources: Sequence[FlatSource], nbytes: int
) -> Iterator[tuple[FlatSource, int, torch.Tensor]]:
    """Yield (source, parameter index, full tensor), gathering one bucket ahead. Collective."""
    buckets = [bucket for source in sources for bucket in _cut(source, nbytes // 2)]
    coming = _gather(buckets[0].source.root, buckets[0]) if buckets else None
    try:
        for number, bucket in enumerate(buckets):
            assert coming is not None
            full, work = coming
            following = buckets[number + 1] if number + 1 < len(buckets) else None
            coming = None if following is None else _gather(following.source.root, following)
            work.wait()
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
            bucket.source.root.context.before_free()
            del full
    finally:
        if coming is not None:
            coming[1].wait()  # Stopped early: the gather must not write to freed memory.
            buckets[0].source.root.context.before_free()


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
            operation = state.operations.next("stream", source.handle.fqns[0], group)
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
            operation = state.operations.next("stream", bucket.source.handle.fqns[0], group)
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


def root_of(shard: Shard) -> RootState:
    sharded_param = None if shard.sharded_param is None else shard.sharded_param()
    root = None if sharded_param is None else _root_of(sharded_param)
    if root is None:
        raise ValueError(
            f"{shard} belongs to no model in this process: it was read from a file, or its model "
            "was deleted. Load it into a model first"
        )
    return root


def gather(root: RootState, shards: Sequence[_Shard]) -> Iterator[tuple[_Shard, torch.Tensor]]:
    """Yield every shard with its full tensor. Collective over the ranks that share the model."""
    handles = [handle for unit in root.units for handle in unit.handles]
    places = {
        id(sharded_param): (number, index)
        for number, handle in enumerate(handles)
        for index, sharded_param in enumerate(handle.sharded_params)
    }
    # A parameter may have several shards (weights, optimizer state, tied weights). A layer takes
    # one shard for each parameter, by its index, so that it can be gathered like the flat one.
    layers: list[dict[torch.dtype, list[dict[int, _Shard]]]] = [{} for _ in handles]
    for shard in shards:
        assert shard.sharded_param is not None
        number, index = places[id(shard.sharded_param())]
        own = layers[number].setdefault(shard.local.dtype, [])
        layer = next((each for each in own if index not in each), None)
        if layer is None:
            own.append(layer := {})
        layer[index] = shard
    sources, layer_of, described = [], {}, dict[Placement, list[Any]]()
    for handle, by_dtype in zip(handles, layers, strict=True):
        of_handle = described.setdefault(handle.placement, [])
        for dtype, own in sorted(by_dtype.items(), key=lambda item: str(item[0])):
            for layer in own:
                parts = {index: shard.local for index, shard in layer.items()}
                read = partial(flat_of, handle, dtype, parts)
                sources.append(FlatSource(root, handle, dtype, read, sorted(layer)))
                layer_of[id(sources[-1])] = layer
                of_handle.append([handle.fqns[0], str(dtype), sorted(layer)])
    for placement, rows in described.items():
        _agree(root, placement, rows)
    for source, index, value in _stream(sources, _BUCKET_NBYTES):
        yield layer_of[id(source)][index], value


def flat_of(
    handle: FlatParamHandle, dtype: torch.dtype, parts: Mapping[int, torch.Tensor]
) -> torch.Tensor:
    """A tensor like the main shard, [shard_numel], with this rank's `parts` of some parameters.

    Args:
        parts: by index of the parameter, in the shapes of the sharded ones.
    """
    flat = torch.zeros_like(handle.main_shard, dtype=dtype)
    ranges = handle.layout.shard_ranges(handle.placement.main_shard_index)
    for index, part in parts.items():
        owned = ranges[index]
        flat[owned.offset : owned.offset + owned.numel] = part.reshape(-1)
    return flat


def _agree(root: RootState, placement: Placement, rows: Sequence[Any]) -> None:
    """Raise CheckpointError on all ranks if ranks would gather different tensors. Collective."""
    count = sum(len(indices) for _, _, indices in rows)
    own = [dist.get_rank(), count, zlib.crc32(json.dumps(rows).encode())]
    table = torch.tensor(own, device=root.device)
    for group in placement.groups:
        table = gather_small(table, group, root.operations.next("exchange", "state dict", group))
    # Experts may be other ones there.
    for group in root.tensor_parallel_groups if placement.data_parallel is None else ():
        operation = root.operations.next_tensor_parallel("exchange", "state dict", group)
        table = gather_small(table, group, operation)
    first, *others = sorted(table.view(-1, 3).tolist())
    for rank, number, digest in others:
        if digest != first[2]:
            raise CheckpointError(
                f"state dict: sharded entries differ between ranks: {first[1]} on rank {first[0]}, "
                f"{number} on rank {rank}; pass the state dict of the same models and optimizers "
                "on every rank"
            )
