"""Layouts are integers: every element has one owner, whatever the sizes."""

import random
import tracemalloc

from layerzero.flat import flatten
from layerzero.flat.layout import FlatLayout, alignment_of


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


def test_the_arithmetic_equals_a_table_of_every_rank() -> None:
    generator = random.Random(0)
    for _ in range(2000):
        count, group_size = generator.randrange(9), generator.randrange(1, 40)
        numels = [generator.choice([0, 1, 7, 16, 63, 64, 300, 2000]) for _ in range(count)]
        alignment, slices = generator.choice([1, 4, 16]), generator.choice([1, 2, 3])
        layout = FlatLayout.build(numels, group_size, alignment, slices)
        _check_owners(layout)
        numel = layout.shard_numel
        for rank in range(group_size):
            own = [part for part in layout.shard_ranges(rank) if part.numel]
            assert [*layout.runs_in(rank * numel, numel)] == own


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


def test_a_layout_costs_the_same_memory_for_any_number_of_ranks() -> None:
    numels = [4096, 3 * 4096**2, 4096**2, 4096, 8 * 4096**2, 8 * 4096**2, 3]

    def cost(group_size: int) -> int:
        tracemalloc.start()
        layout = FlatLayout.build(numels, group_size, alignment=16)
        own = layout.runs_in(group_size // 2 * layout.shard_numel, layout.shard_numel)
        assert len([*own]) <= len(numels)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return peak

    cost(2)
    few = cost(8)
    assert all(cost(group_size) <= few + 4096 for group_size in (64, 4096, 1 << 20))
