"""Layouts whose borders lie on rows (`layout="rows"`); integers only.

Note [Borders on rows]
    With `layout="rows"` each border inside a parameter lies on one of its rows (slices of dimension
    0). Parameters keep their order; a gap before one moves the first border inside it to a row, and
    if there are more, the shard is a multiple of its row. A start stays a multiple of the
    alignment, so a gap is shorter than lcm(row, alignment).

        numels (5, 32, 3), rows (1, 4, 1), i.e. b is [8, 4]; alignment 2, two ranks: shard_numel 22

            rank 0 | a a a a a - b0 b0 b0 b0 ... b3 b3 b3 b3 |    a starts at 0, b at 6, c at 38
            rank 1 | b4 b4 b4 b4 ... b7 b7 b7 b7 c c c . . . |    the border is row 4 of b

    The shard is the shortest found of a few dozen candidates, not of all. Rows of very different
    lengths are apart in flat buffers of their own where that pads less (`split`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import lcm, prod

from layerzero.flat.layout import FlatLayout, round_up

_TRIES = 32
"""Shard lengths tried for each divisor of them; see `build`."""
_LEAST_SPARED = 1 << 20
"""Elements of padding, over all ranks, that one more flat buffer must spare to be worth its
collectives."""


def row_numels(shapes: Sequence[Sequence[int]], multiple: int) -> list[int]:
    """`rows` for `build`: elements of `multiple` rows of each shape.

    Parameters of fewer than two dimensions are cut anywhere.
    """
    return [max(prod(shape[1:]) * multiple, 1) if len(shape) > 1 else 1 for shape in shapes]


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
    if group_size == 1:
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
    if group_size == 1:
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
