"""Flattens the parameters that a user wrote: this rank's part of them, once, at construction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from layerzero.flat.layout import FlatLayout, ShardRange, alignment_of
from layerzero.flat.parameter_info import (
    ParameterInfo,
    copy_attributes,
    describe_place,
    get_info,
    set_info,
    set_sharded_param,
    sharded_param_of,
)
from layerzero.flat.placement import Placement
from layerzero.flat.tensor_parallel import TensorParallelSplit
from layerzero.ops import Segments, pack_


class Slot(NamedTuple):
    """A module's attribute that holds a parameter, `module.name`; tied parameters have several."""

    module: nn.Module
    name: str


_BORDERS = "_layerzero_borders"
"""Attribute of a sharded parameter: what decides its range on each rank, the same on all."""


@dataclass
class OriginalParameter:
    """A parameter as the user wrote it, and every slot of the module tree that holds it."""

    fqn: str
    parameter: nn.Parameter
    slots: list[Slot]
    value: torch.Tensor = field(init=False)
    """This rank's value before flattening, detached; of a DTensor, the local tensor."""


def kinds_of_rows(
    originals: Sequence[OriginalParameter],
    placement: Placement,
    device: torch.device,
    compute_dtype: torch.dtype,
    row_multiple: int | None,
) -> list[Sequence[OriginalParameter]]:
    """Parameters of one dtype, by the flat parameter that they belong in."""
    if row_multiple is None:
        return [originals]
    from layerzero.flat import rows

    # Of whole DTensors, so that it is the same on all tensor-parallel ranks.
    shapes = [original.parameter.shape for original in originals]
    itemsize = min(originals[0].parameter.dtype.itemsize, compute_dtype.itemsize)
    sizes = _sizes(shapes, placement, device, itemsize)
    parts = rows.split(*sizes, rows.row_numels(shapes, row_multiple))
    return [[originals[index] for index in part] for part in parts]


def _sizes(
    shapes: Sequence[torch.Size], placement: Placement, device: torch.device, itemsize: int
) -> tuple[list[int], int, int, int]:
    """The arguments of `FlatLayout.build`."""
    numels, alignment = [shape.numel() for shape in shapes], alignment_of(device.type, itemsize)
    return numels, placement.num_main_shards, alignment, placement.owned_slices


def lay_out(
    shapes: Sequence[torch.Size],
    placement: Placement,
    device: torch.device,
    itemsize: int,
    row_multiple: int | None,
) -> FlatLayout:
    """The layout of one flat parameter, whose narrowest elements have `itemsize` bytes."""
    sizes = _sizes(shapes, placement, device, itemsize)
    if row_multiple is None:
        return FlatLayout.build(*sizes)
    from layerzero.flat import rows

    return rows.build(*sizes, rows.row_numels(shapes, row_multiple))


def fill_shard(
    main_shard: torch.Tensor, values: Sequence[torch.Tensor], ranges: Sequence[ShardRange]
) -> None:
    """Fill a main shard with these ranges of `values`; gaps and padding become zero."""
    sources = [
        value.reshape(-1)[owned.start : owned.stop].to(main_shard.device)
        for value, owned in zip(values, ranges, strict=True)
    ]
    # `pack_` needs rising destinations; empty ranges have offset 0 and would break the order.
    rows = ((owned.param, 0, owned.offset, owned.numel) for owned in ranges if owned.numel)
    pack_(main_shard, sources, Segments.build(rows, main_shard.numel()))


def make_sharded(
    original: OriginalParameter,
    part: torch.Tensor,
    owned: ShardRange,
    split: TensorParallelSplit | None,
    layout: FlatLayout,
    describes_place: bool,
) -> nn.Parameter:
    """The sharded parameter that shows `part` of a main shard."""
    shape, place = original.parameter.shape, (owned.start, owned.stop)
    # The first owner, its range and the next one's decide the range of each rank.
    first = layout.starts[owned.param] // max(layout.shard_numel, 1)
    borders = first, *(layout.owned_range(owned.param, first + more) for more in (0, 1))
    # After `rewrap`, reuse the former Parameter object if no rank's range changed: all ranks alike.
    kept = sharded_param_of(original.parameter)
    info = None if kept is None else get_info(kept)
    if (
        kept is not None
        and info is not None
        and (info.shape, info.range, getattr(kept, _BORDERS, None)) == (shape, place, borders)
        and (kept.shape, kept.dtype, kept.device) == (part.shape, part.dtype, part.device)
    ):
        sharded = kept  # An optimizer may hold it, with state of this range.
        sharded.data = part
    else:
        # Through `.data`, so that it counts its own versions: see `FlatParam.note_gathered`.
        sharded = nn.Parameter(part.data, requires_grad=original.parameter.requires_grad)
    copy_attributes(original.parameter, sharded)
    set_info(sharded, ParameterInfo(original.fqn, shape, place, split))
    setattr(sharded, _BORDERS, borders)
    if describes_place:
        describe_place(sharded)
    set_sharded_param(original.parameter, sharded)
    return sharded
