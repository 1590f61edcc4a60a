"""Layouts are integers: every element has one owner, whatever the sizes."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Sequence

import pytest

from layerzero.flat import flatten
from layerzero.flat.layout import FlatLayout, GradientLayout, ShardRange, alignment_of, round_up


def test_the_drawing_in_the_module_is_right() -> None:
    layout = FlatLayout.build([5, 20, 3], group_size=2, alignment=4)
    assert layout.starts == (0, 8, 28)
    assert layout.shard_numel == 16
    assert layout.owned_range(1, 0) == (0, 8)
    assert layout.owned_range(1, 1) == (8, 20)
    assert layout.owned_range(2, 0) == (0, 0)


def test_alignment_is_in_elements_and_wider_on_devices() -> None:
    assert [alignment_of("cpu", itemsize) for itemsize in (1, 2, 4, 8, 16)] == [64, 32, 16, 8, 4]
    for device_type in ("cuda", "xpu", "npu"):
        assert [alignment_of(device_type, size) for size in (1, 2, 4, 8)] == [256, 128, 64, 32]


def test_borders_between_shards_lie_on_rows_and_starts_are_aligned() -> None:
    draw = random.Random(0)
    for _ in range(500):
        lengths = [draw.choice([1, 3, 7, 16, 48]) for _ in range(draw.randrange(6))]
        numels = [length * draw.randrange(20) for length in lengths]
        alignment, slices = draw.choice([1, 4, 16]), draw.choice([1, 2])
        layout = flatten.build(numels, draw.randrange(1, 9), alignment, slices, lengths)
        assert layout.shard_numel % (alignment * slices) == 0
        end = 0
        for index, (start, numel) in enumerate(zip(layout.starts, numels, strict=True)):
            assert start % alignment == 0 and end <= start
            end = start + numel
            owned = [layout.owned_range(index, rank) for rank in range(layout.group_size)]
            assert all(each % lengths[index] == 0 for borders in owned for each in borders)
        assert end <= layout.padded_numel


def test_padding_of_real_units_is_below_a_thousandth() -> None:
    width = 1024
    block = [width, 3 * width * width, width * width, width, 4 * width * width, 4 * width * width]
    for group_size in (2, 8, 64, 512):
        layout = FlatLayout.build(block, group_size, alignment=16)
        assert layout.padded_numel - sum(block) < 1e-3 * sum(block)


def _table(layout: FlatLayout, trainable: Sequence[int]) -> tuple[int, list[list[ShardRange]]]:
    """Chunk size and every rank's shards, packed rank by rank: what the arithmetic must come to."""
    if len(trainable) == len(layout.numels):
        ranges = map(layout.shard_ranges, range(layout.group_size))
        return layout.shard_numel, [[own for own in each if own.numel] for each in ranges]
    chunks, longest = [], 0
    for rank in range(layout.group_size):
        ranges, end = [], 0
        for index in trainable:
            start, stop = layout.owned_range(index, rank)
            offset = round_up(end, layout.alignment) if start < stop else 0
            if start < stop:
                ranges.append(ShardRange(index, start, stop, offset))
                end = offset + stop - start
        chunks.append(ranges)
        longest = max(longest, end)
    return round_up(longest, layout.alignment * layout.slices), chunks


def test_the_arithmetic_equals_a_table_of_every_rank() -> None:
    generator = random.Random(0)
    for _ in range(2000):
        count, group_size = generator.randrange(9), generator.randrange(1, 40)
        numels = [generator.choice([0, 1, 7, 16, 63, 64, 300, 2000]) for _ in range(count)]
        alignment, slices = generator.choice([1, 4, 16]), generator.choice([1, 2, 3])
        layout = FlatLayout.build(numels, group_size, alignment, slices)
        _check_owners(layout)
        trainable = [index for index in range(count) if generator.random() < 0.6]
        gradients = GradientLayout.build(layout, trainable)
        chunk_numel, chunks = _table(layout, trainable)
        assert gradients.chunk_numel == chunk_numel
        if len(trainable) == count:
            assert len(gradients.segments) == sum(numel > 0 for numel in numels), "one run each"
        found = (gradients.runs_in(rank * chunk_numel, chunk_numel) for rank in range(group_size))
        assert [sorted(each) for each in found] == chunks
        assert _elements(gradients.segments) == _elements(
            part._replace(offset=rank * chunk_numel + part.offset)
            for rank, chunk in enumerate(chunks)
            for part in chunk
        )


def _check_owners(layout: FlatLayout) -> None:
    """Every element has one owner, who has it where the whole buffer has it."""
    assert layout.shard_numel % layout.alignment == 0
    assert all(start % layout.alignment == 0 for start in layout.starts)
    ends = [0] * len(layout.numels)
    for rank in range(layout.group_size):
        for part in layout.shard_ranges(rank):
            if part.numel:
                assert part.start == ends[part.param]
                ends[part.param] = part.stop
                position = rank * layout.shard_numel + part.offset
                assert position == layout.starts[part.param] + part.start
                assert part.offset + part.numel <= layout.shard_numel
    assert ends == [*layout.numels]


def _elements(ranges) -> list[tuple[int, int, int]]:
    """(position in the buffer, parameter, element of it) of all elements."""
    return [
        (part.offset + place, part.param, part.start + place)
        for part in ranges
        for place in range(part.numel)
    ]


@pytest.mark.parametrize("frozen", [(), (1,), (0, 2, 5)], ids=["all", "one frozen", "half frozen"])
def test_a_layout_costs_the_same_memory_for_any_number_of_ranks(frozen: tuple[int, ...]) -> None:
    numels = [4096, 3 * 4096**2, 4096**2, 4096, 8 * 4096**2, 8 * 4096**2, 3]
    trainable = [index for index in range(len(numels)) if index not in frozen]

    def cost(group_size: int) -> tuple[int, int]:
        tracemalloc.start()
        layout = FlatLayout.build(numels, group_size, alignment=16)
        gradients = GradientLayout.build(layout, trainable)
        own = gradients.runs_in(group_size // 2 * gradients.chunk_numel, gradients.chunk_numel)
        assert len([*own]) <= len(trainable)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return len(gradients.segments), peak

    cost(2)
    few, of_few = cost(8)
    for group_size in (64, 4096, 1 << 20):
        many, of_many = cost(group_size)
        assert many <= 3 * len(trainable)
        assert of_many <= of_few * max(1.0, many / few) + 4096
