"""Collects full tensors: of a model, and in place of the shards in state dicts.

Flat parameters are gathered as in training, whole and one after the other. The next one is gathered
while the tensors of one are in use, if both fit in a bound on their bytes. See decision 0047.
"""

from __future__ import annotations

import json
import zlib
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from layerzero.comm.collectives import all_gather
from layerzero.comm.exchanges import gather_along
from layerzero.comm.pending import Pending
from layerzero.comm.streams import Waitable
from layerzero.config import parse_nbytes
from layerzero.errors import CheckpointError
from layerzero.flat.placement import Placement
from layerzero.state_dict.names import Names, named_buffers
from layerzero.state_dict.preconditions import root_states_of, unit_of
from layerzero.step.handle import FlatParamHandle
from layerzero.step.operations import remembers_failure
from layerzero.step.root import RootState, root_of

_AHEAD_NBYTES = 1 << 30
"""Bound on two flat tensors of a state dict, of which one is gathered ahead."""


@dataclass(frozen=True)
class FlatSource:
    """A flat tensor in the layout of a handle, sharded like its main shard."""

    root: RootState
    handle: FlatParamHandle
    dtype: torch.dtype
    """Dtype of the full tensors."""
    shard: Callable[[], torch.Tensor]
    """Returns this rank's shard, [shard_numel]; called when its gather begins."""
    wanted: Mapping[int, Any]
    """What full tensors are yielded with, by index of the handle's parameter; others are not."""

    @property
    def nbytes(self) -> int:
        """Bytes of the full flat tensor."""
        return self.handle.layout.padded_numel * self.dtype.itemsize


def stream_full(
    model: nn.Module,
    bucket_bytes: int | str = "1GB",
    *,
    dtype: torch.dtype | None = None,
    only: Container[str] | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, full tensor) of every parameter and persistent buffer, on every rank.

    For passing weights to an inference engine or writing them to a file. Collective over the ranks
    that share the model: all must take every item, and none may train meanwhile. Flat parameters
    are gathered whole, one after the other. Does not block the host on a device with streams.

    Args:
        model: a ZeRO3 module, between steps.
        bucket_bytes: an int or a string such as "512MB". The next flat parameter is gathered while
            the tensors of one are in use, if both fit in so many bytes; otherwise after that. The
            tensors are views of the flat one, so drop each before taking the next.
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
    root_states_of(model, "stream_full", is_collective=True)

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        names = Names(model)
        sources = []
        for handle in names.handles:
            own = handle.main_shard.dtype
            target = dtype if dtype is not None and own.is_floating_point else own
            unit = unit_of(handle.sharded_params[0])
            assert unit is not None, "the model of the handle exists"
            found = enumerate(map(names.first, handle.sharded_params))
            wanted = {index: name for index, name in found if only is None or name in only}
            read = partial(_main_shard, handle, target)
            sources.append(FlatSource(root_of(unit), handle, target, read, wanted))
        yield from _stream(sources, nbytes)
        for tensor, (name, *_) in [*names.unsharded(), *named_buffers(model)]:
            if only is None or name in only:
                yield name, tensor.detach()

    return stream()


def _main_shard(handle: FlatParamHandle, dtype: torch.dtype) -> torch.Tensor:
    handle.reset_sharded_params(handle.fqns[0])
    return handle.main_shard.detach().to(dtype)


def _stream(sources: Iterable[FlatSource], nbytes: int) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yield each of what is wanted with its full tensor. Collective.

    The next source is gathered while the tensors of one are in use, if both fit in `nbytes`.
    """
    waiting = deque(source for source in sources if source.wanted)
    coming: tuple[torch.Tensor, Waitable] | None = None
    try:
        while waiting:
            source = waiting.popleft()
            full, work = coming or _gather(source.root, source)
            fits = bool(waiting) and source.nbytes + waiting[0].nbytes <= nbytes
            coming = _gather(waiting[0].root, waiting[0]) if fits else None
            work.wait()
            for index, wanted in source.wanted.items():
                view: Any = source.handle.view_of(full, index)
                if source.handle.splits[index] is not None:
                    view = view.full_tensor()  # Collective over the mesh.
                yield wanted, view
                del view
            source.root.context.before_free()
            del full
    finally:
        if coming is not None:
            coming[1].wait()  # Stopped early: the gather must not write to freed memory.
            waiting[0].root.context.before_free()


@remembers_failure
def _gather(root: RootState, source: FlatSource) -> tuple[torch.Tensor, Waitable]:
    """Start gathering; returns the flat tensor, [padded_numel], and a handle to wait for."""
    # After writes of what is read here, and after reads of memory that is reused.
    event = root.streams.record_compute_event()
    with root.streams.unshard as stream:
        stream.wait(event)
        full = source.shard().to(root.device, non_blocking=True)
        pending: Pending | None = None
        for group in source.handle.placement.owner_groups:
            if pending is not None:
                pending.wait()
            part, full = full, full.new_empty(full.numel() * group.size)
            operation = root.operations.next("stream", source.handle.fqns[0], group)
            pending = all_gather(full, part, group, operation)
        if pending is None:
            return full.clone(), stream.drain_handle()
        return full, stream.enqueue_wait(pending)


def gather(
    root: RootState, shards: Mapping[int, tuple[nn.Parameter, torch.Tensor]]
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the key of every shard with its full tensor. Collective over the ranks that share the
    model. `shards`: each with its sharded parameter, whose shape it has."""
    handles = [handle for unit in root.units for handle in unit.handles]
    places = {
        id(sharded_param): (number, index)
        for number, handle in enumerate(handles)
        for index, sharded_param in enumerate(handle.sharded_params)
    }
    # A parameter may have several shards (weights, optimizer state, tied weights). A layer takes
    # one shard for each parameter, by its index, so that it can be gathered like the flat one.
    layers: list[dict[torch.dtype, list[dict[int, int]]]] = [{} for _ in handles]
    for key, (sharded_param, local) in shards.items():
        number, index = places[id(sharded_param)]
        own = layers[number].setdefault(local.dtype, [])
        layer = next((each for each in own if index not in each), None)
        if layer is None:
            own.append(layer := {})
        layer[index] = key
    sources, described = [], dict[Placement, list[Any]]()
    for handle, by_dtype in zip(handles, layers, strict=True):
        of_handle = described.setdefault(handle.placement, [])
        for dtype, own in sorted(by_dtype.items(), key=lambda item: str(item[0])):
            for layer in own:
                parts = {index: shards[key][1] for index, key in layer.items()}
                read = partial(flat_of, handle, dtype, parts)
                sources.append(FlatSource(root, handle, dtype, read, dict(sorted(layer.items()))))
                of_handle.append([handle.fqns[0], str(dtype), sorted(layer)])
    for placement, rows in described.items():
        _agree(root, placement, rows)
    yield from _stream(sources, _AHEAD_NBYTES)


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
    name = partial(root.operations.next, "exchange", "state dict")
    # Experts may be other ones on tensor-parallel ranks.
    across = root.tensor_parallel_groups if placement.data_parallel is None else ()
    table = torch.tensor(own, device=root.device)
    table = gather_along(table, [*placement.groups, *across], name)
    first, *others = sorted(table.view(-1, 3).tolist())
    for rank, number, digest in others:
        if digest != first[2]:
            raise CheckpointError(
                f"state dict: sharded entries differ between ranks: {first[1]} on rank {first[0]}, "
                f"{number} on rank {rank}; pass the state dict of the same models and optimizers "
                "on every rank"
            )
