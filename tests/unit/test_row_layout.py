"""Note [Borders on rows]: every part has whole rows, for random shapes and 1 to 4,096 ranks."""

from __future__ import annotations

import random

import pytest

from layerzero.flat.layout import FlatLayout, GradientLayout, round_up
from layerzero.flat.rows import build, split

Model = list[tuple[int, int]]
"""(elements, elements of a row) of each parameter of a unit."""


def _block(hidden: int, mlp: int, kv: int) -> Model:
    norm, down = (hidden, 1), (hidden * mlp, mlp)
    attention = [(width * hidden, hidden) for width in (hidden, kv, kv, hidden)]
    return [norm, *attention, norm, (mlp * hidden, hidden), (mlp * hidden, hidden), down]


def _experts(hidden: int, mlp: int, count: int) -> Model:
    """A block with fused experts, [count, hidden, 2 * mlp] and [count, mlp, hidden]."""
    attention = [(4096 * hidden, hidden), (512 * hidden, hidden), (hidden * 4096, 4096)]
    sizes = (hidden * 2 * mlp, 2 * mlp, mlp * hidden, hidden)
    return [*attention, (count * hidden, hidden), *[(count * row, row) for row in sizes]]


LLAMA_8B, LLAMA_70B = _block(4096, 14336, 1024), _block(8192, 28672, 1024)
QWEN_30B, GPT_OSS_20B, GPT_OSS_120B = (
    _experts(2048, 768, 128),
    _experts(2880, 2880, 32),
    _experts(2880, 2880, 128),
)


def test_the_drawing_in_the_module_is_right() -> None:
    layout = build([5, 32, 3], 2, 2, 1, [1, 4, 1])
    assert (layout.starts, layout.shard_numel) == ((0, 6, 38), 22)
    assert [layout.owned_range(1, rank) for rank in (0, 1)] == [(0, 16), (16, 32)]


def _check(layout: FlatLayout, rows: list[int]) -> None:
    """Borders inside parameters lie on rows, starts are aligned, and everything is in the buffer.

    Looks at the borders of each parameter, not at each rank's: there may be thousands of ranks.
    """
    shard, end = layout.shard_numel, 0
    assert shard % (layout.alignment * layout.slices) == 0
    for index, (start, numel) in enumerate(zip(layout.starts, layout.numels, strict=True)):
        assert start % layout.alignment == 0 and start >= end
        end = start + numel
        borders = range(round_up(start + 1, shard), end, shard) if shard else ()
        assert all((border - start) % rows[index] == 0 for border in borders)
        owned = [layout.owned_range(index, border // shard) for border in borders]
        assert all(first % rows[index] == 0 for first, _ in owned)
    assert end <= layout.padded_numel


def test_borders_lie_on_rows_for_random_shapes() -> None:
    generator = random.Random(0)
    for _ in range(1000):
        count, group_size = generator.randrange(9), generator.choice([1, 2, 3, 8, 13, 64, 4096])
        rows = [generator.choice([1, 1, 3, 8, 48, 64, 100, 2880, 4099]) for _ in range(count)]
        numels = [row * generator.choice([0, 1, 2, 7, 64, 300]) for row in rows]
        alignment, slices = generator.choice([1, 4, 16, 128]), generator.choice([1, 2, 3])
        layout = build(numels, group_size, alignment, slices, rows)
        _check(layout, rows)
        parts = split(numels, group_size, alignment, slices, rows)
        assert sorted(index for part in parts for index in part) == [*range(count)] or parts == [[]]
        assert all(part == sorted(part) for part in parts)


def test_every_part_of_a_gradient_has_whole_rows_with_frozen_parameters() -> None:
    rows = [8, 1, 48, 16]
    layout = build([800, 40, 4800, 320], 8, 4, 1, rows)
    for trainable in ([0, 1, 2, 3], [2], [0, 3]):
        gradients = GradientLayout.build(layout, trainable)
        for rank in range(8):
            for part in gradients.chunk(rank):
                assert part.numel % rows[part.param] == 0
                assert (part.start, part.stop) == layout.owned_range(part.param, rank)


def test_rows_of_one_element_lie_as_elements_do() -> None:
    for numels in ([5, 20, 3], [1, 0, 1, 7, 0], [0, 0], []):
        for group_size in (1, 2, 7):
            plain = FlatLayout.build(numels, group_size, 4)
            assert build(numels, group_size, 4, 1, [1] * len(numels)) == plain


def _padding(unit: Model, group_size: int, multiple: int = 1) -> tuple[int, float]:
    """(number of buffers, padded elements over the elements)."""
    numels = [numel for numel, _ in unit]
    rows = [row if row == 1 else row * multiple for _, row in unit]
    parts, padded = split(numels, group_size, 16, 1, rows), 0
    for part in parts:
        taken = [numels[index] for index in part], [rows[index] for index in part]
        layout = build(taken[0], group_size, 16, 1, taken[1])
        _check(layout, taken[1])
        padded += layout.padded_numel
    return len(parts), padded / sum(numels) - 1


def _padding_of_whole_parameters(unit: Model, group_size: int) -> float:
    """What an engine pads that shards each parameter by itself on dimension 0."""
    padded = sum(round_up(numel // row, group_size) * row for numel, row in unit)
    return padded / sum(numel for numel, _ in unit) - 1


@pytest.mark.parametrize(
    ("unit", "at_8", "at_64"),
    [
        pytest.param(LLAMA_8B, 0.0002, 0.002, id="Llama-8B"),
        pytest.param(LLAMA_70B, 0.0005, 0.004, id="Llama-70B"),
        pytest.param(QWEN_30B, 0.01, 0.001, id="Qwen3-30B-A3B"),
        pytest.param(GPT_OSS_20B, 0.002, 0.3, id="GPT-OSS-20B"),
        pytest.param(GPT_OSS_120B, 0.001, 0.003, id="GPT-OSS-120B"),
    ],
)
def test_little_is_padded_where_there_are_as_many_rows_as_ranks(
    unit: Model, at_8: float, at_64: float
) -> None:
    assert _padding(unit, 8)[1] <= at_8
    assert _padding(unit, 64)[1] <= at_64
    for group_size in (512, 4096):  # Fewer rows than ranks: no more than by parameter, or 1 %.
        ours, theirs = _padding(unit, group_size)[1], _padding_of_whole_parameters(unit, group_size)
        assert ours <= max(theirs, 0.01)


def test_multiples_of_rows() -> None:
    assert _padding(LLAMA_8B, 8, multiple=32)[1] < 0.01


def test_long_rows_have_buffers_of_their_own_where_that_spares_much() -> None:
    assert _padding(GPT_OSS_20B, 8)[0] == 3
    assert _padding(LLAMA_8B, 64)[0] == 1
    small = [(numel // 4096, max(row // 4096, 1)) for numel, row in GPT_OSS_20B]
    assert _padding(small, 8)[0] == 1, "a collective costs more than a little padding"
