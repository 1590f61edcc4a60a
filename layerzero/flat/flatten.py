"""Flattens the parameters that a user wrote: this rank's part of them, once, at construction.

Note [Borders on rows]
    With `layout="rows"` each border inside a parameter lies on one of its rows (slices of dimension
    0). Parameters keep their order; a gap before one moves the first border inside it to a row, and
    if there are more, the shard is a multiple of its row. A start stays a multiple of the
    alignment, so a gap is shorter than lcm(row, alignment).

        numels (5, 32, 3), rows (1, 4, 1), i.e. b is [8, 4]; alignment 2, two ranks: shard_numel 22

            rank 0 | a a a a a - b0 b0 b0 b0 ... b3 b3 b3 b3 |    a starts at 0, b at 6, c at 38
            rank 1 | b4 b4 b4 b4 ... b7 b7 b7 b7 c c c . . . |    the border is row 4 of b

    The shard is the shortest found of a few dozen candidates (decision 0037).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import lcm
from typing import NamedTuple

import torch
from torch import nn

from layerzero.flat.layout import FlatLayout, ShardRange, alignment_of, round_up
from layerzero.flat.parameter_info import (
    ParameterInfo,
    copy_attributes,
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
_TRIES = 32
"""Shard lengths tried for each divisor of them; see `build`."""
_LEAST_SPARED = 1 << 20
"""Elements of padding, over all ranks, that one more flat buffer must spare to be worth its
collectives."""


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
) -> list[list[OriginalParameter]]:
    """Parameters of one dtype, by the flat parameter that they belong in."""
    # Of whole DTensors, so that it is the same on all tensor-parallel ranks.
    shapes = [original.parameter.shape for original in originals]
    itemsize = min(originals[0].parameter.dtype.itemsize, compute_dtype.itemsize)
    parts = split(*sizes(shapes, placement, device, itemsize, row_multiple))
    return [[originals[index] for index in part] for part in parts]


def sizes(
    shapes: Sequence[torch.Size],
    placement: Placement,
    device: torch.device,
    itemsize: int,
    row_multiple: int | None,
) -> tuple[list[int], int, int, int, list[int]]:
    """The arguments of `build` for a flat parameter, whose narrowest elements have `itemsize`
    bytes; parameters of fewer than two dimensions are cut anywhere."""
    numels, alignment = [shape.numel() for shape in shapes], alignment_of(device.type, itemsize)
    rows = [
        max(shape[1:].numel() * row_multiple, 1) if row_multiple and len(shape) > 1 else 1
        for shape in shapes
    ]
    return numels, placement.num_main_shards, alignment, placement.owned_slices, rows


def build(
    numels: Sequence[int], group_size: int, alignment: int, slices: int, rows: Sequence[int]
) -> FlatLayout:
    """`FlatLayout.build` with borders on rows, and the shortest shard that was found.

    A parameter with more than one border inside needs a shard that is a multiple of its row. Which
    parameters these are depends on the shard; so those that are longest are assumed to be, ever
    more of them.

    Args:
        rows: elements of which each part of a parameter has a multiple, apart from the last part.
    """
    layout = FlatLayout.build(numels, group_size, alignment, slices)
    if group_size == 1 or max(rows, default=1) == 1:
        return layout
    end = layout.starts[-1] + layout.numels[-1] if layout.numels else 0
    unit = layout.alignment * layout.slices
    best = replace(layout, shard_numel=round_up(end, unit))  # One rank has all: always right.
    steps = [unit]
    for numel, row in sorted(zip(layout.numels, rows, strict=True), reverse=True):
        step = lcm(steps[-1], row)
        if numel > layout.shard_numel and step != steps[-1]:
            steps.append(step)
    for step in steps:
        shard_numel = round_up(layout.shard_numel, step)
        for _ in range(_TRIES):
            if shard_numel >= best.shard_numel:
                break
            starts = _place(layout, rows, shard_numel)
            end = shard_numel if starts is None else starts[-1] + layout.numels[-1]
            if starts is not None and end <= layout.group_size * shard_numel:
                best = replace(layout, starts=tuple(starts), shard_numel=shard_numel)
                break
            shard_numel = round_up(max(shard_numel + 1, -(-end // layout.group_size)), step)
    return best


def _place(layout: FlatLayout, rows: Sequence[int], shard_numel: int) -> list[int] | None:
    """The earliest start of each parameter, in order; None if a border inside one of them cannot
    lie on a row, however long the buffer is."""
    starts, end = [], 0
    for numel, row in zip(layout.numels, rows, strict=True):
        start = round_up(end, layout.alignment)
        border = round_up(start + 1, shard_numel)  # The first that may lie inside.
        if start + numel > border and (border - start) % row:
            step = lcm(row, layout.alignment)
            start = border - (border - start) // step * step
            if start == border:
                border += shard_numel
        cuts = max(start + numel - border - 1, -1) // shard_numel + 1
        if (cuts and (border - start) % row) or (cuts > 1 and shard_numel % row):
            return None
        starts.append(start)
        end = start + numel
    return starts


def split(
    numels: Sequence[int], group_size: int, alignment: int, slices: int, rows: Sequence[int]
) -> list[list[int]]:
    """Distribute parameters over flat buffers so that little is padded, for `build`.

    Rows of millions of elements (fused experts) make a shared shard a multiple of them, or of the
    least common multiple of several lengths. So the longest rows may get a buffer per length.

    Returns:
        Indices of the parameters of each buffer, rising; one list of all where that pads under 1 %.
    """
    every = [*range(len(numels))]
    if group_size == 1 or max(rows, default=1) == 1:
        return [every]

    def padded(parts: list[list[int]]) -> int:
        return sum(
            build(
                [numels[i] for i in part], group_size, alignment, slices, [rows[i] for i in part]
            ).padded_numel
            for part in parts
        )

    best, least = [every], padded([every])
    lengths = sorted({row for row in rows if row > 1}, reverse=True)
    for count in range(1, len(lengths) + 1):
        if least - sum(numels) < max(_LEAST_SPARED, sum(numels) // 100):
            break
        apart = [[i for i in every if rows[i] == length] for length in lengths[:count]]
        rest = [i for i in every if rows[i] not in lengths[:count]]
        parts = [part for part in (*apart, rest) if part]
        numel = padded(parts)
        if least - numel >= _LEAST_SPARED * (len(parts) - len(best)):
            best, least = parts, numel
    return sorted(best)


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
    set_sharded_param(original.parameter, sharded)
    return sharded
