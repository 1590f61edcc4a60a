"""Layouts are integers: every element has one owner, borders on rows keep rows whole, and buffers
that meet in an arena do not overlap."""

import random
import tracemalloc
from collections.abc import Sequence
from math import inf

import pytest

from layerzero.arena_layout import (
    ALIGNMENT,
    Demand,
    Event,
    Pass,
    Place,
    Prefetching,
    demand,
    last_gives,
    lay_out,
    with_prefetch,
)
from layerzero.flat.layout import FlatLayout, GradientLayout, ShardRange, alignment_of, round_up
from layerzero.flat.rows import build, split

SIZES = {
    "even": ([64, 64], 2),
    "odd sizes": ([5, 20, 3], 2),
    "scalars and empty": ([1, 0, 1, 7, 0], 3),
    "only empty": ([0, 0], 4),
    "nothing": ([], 2),
    "smaller than the group": ([2], 5),
    "one rank": ([33, 17], 1),
    "cut over many ranks": ([1000, 3], 7),
}


def layouts() -> list:
    return [
        pytest.param(FlatLayout.build(numels, size, alignment), id=f"{name}, alignment {alignment}")
        for name, (numels, size) in SIZES.items()
        for alignment in (1, 4, 16)
    ]


def owned_elements(ranges, numels) -> list[set[int]]:
    owned: list[set[int]] = [set() for _ in numels]
    for part in ranges:
        run = set(range(part.start, part.stop))
        assert not owned[part.param] & run, "an element has two owners"
        owned[part.param] |= run
    return owned


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


@pytest.mark.parametrize("layout", layouts())
def test_every_element_has_one_owner_and_starts_are_aligned(layout: FlatLayout) -> None:
    ranges = [part for rank in range(layout.group_size) for part in layout.shard_ranges(rank)]
    owned = owned_elements(ranges, layout.numels)
    assert owned == [set(range(numel)) for numel in layout.numels]
    assert all(start % layout.alignment == 0 for start in layout.starts)
    assert layout.shard_numel % layout.alignment == 0
    for rank in range(layout.group_size):
        for part in layout.shard_ranges(rank):
            if part.numel:
                position = rank * layout.shard_numel + part.offset
                assert position == layout.starts[part.param] + part.start
                assert part.offset + part.numel <= layout.shard_numel


def test_padding_of_real_units_is_below_a_thousandth() -> None:
    width = 1024
    block = [width, 3 * width * width, width * width, width, 4 * width * width, 4 * width * width]
    for group_size in (2, 8, 64, 512):
        layout = FlatLayout.build(block, group_size, alignment=16)
        assert layout.padded_numel - sum(block) < 1e-3 * sum(block)


def _table(layout: FlatLayout, trainable: Sequence[int]) -> tuple[int, list[list[ShardRange]]]:
    """Chunk size and every rank's shards, packed rank by rank: what the arithmetic must come to."""
    if len(trainable) == len(layout.numels):
        chunks = [list(layout.shard_ranges(rank)) for rank in range(layout.group_size)]
        return layout.shard_numel, chunks
    chunks, longest = [], 0
    for rank in range(layout.group_size):
        ranges, end = [], 0
        for index in trainable:
            start, stop = layout.owned_range(index, rank)
            offset = round_up(end, layout.alignment) if start < stop else 0
            ranges.append(ShardRange(index, start, stop, offset))
            if start < stop:
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
        trainable = [index for index in range(count) if generator.random() < 0.6]
        gradients = GradientLayout.build(layout, trainable)
        chunk_numel, chunks = _table(layout, trainable)
        assert gradients.chunk_numel == chunk_numel
        if len(trainable) == count:
            assert len(gradients.segments) == sum(numel > 0 for numel in numels), "one run each"
        assert [list(gradients.chunk(rank)) for rank in range(group_size)] == chunks
        assert _elements(gradients.segments) == _elements(
            part._replace(offset=rank * chunk_numel + part.offset)
            for rank, chunk in enumerate(chunks)
            for part in chunk
        )


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
        chunk = gradients.chunk(group_size // 2)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert len(chunk) == len(trainable)
        return len(gradients.segments), peak

    cost(2)
    few, of_few = cost(8)
    for group_size in (64, 4096, 1 << 20):
        many, of_many = cost(group_size)
        assert many <= 3 * len(trainable)
        assert of_many <= of_few * max(1.0, many / few) + 4096


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


def test_the_drawing_of_borders_on_rows_is_right() -> None:
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


MB = 1 << 20
ROOT = 1000
INPUTS = 2000
"""Added to a unit's number for the input of its reduction."""


def take(buffer: int, is_behind: bool = False) -> Event:
    return Event(True, buffer, is_behind)


def give(buffer: int) -> Event:
    return Event(False, buffer)


def chain(sizes: Sequence[int], root: int) -> tuple[list[Pass], dict[int, int], set[int]]:
    """A forward and a backward of units that run one after the other, gathered on demand."""
    numbers = range(len(sizes))
    nbytes = {unit: size for unit, size in zip(numbers, sizes, strict=True)} | {ROOT: root}
    nbytes |= {INPUTS + unit: size for unit, size in nbytes.items()}
    forward, backward = [take(ROOT), take(0)], []
    for unit in numbers[1:]:
        forward += [give(unit - 1), take(unit)]
    last = len(sizes) - 1
    for unit in reversed(numbers):  # A unit is done when the one before it is reached.
        backward += [give(unit), *([give(INPUTS + unit + 1)] if unit < last else [])]
        backward += [take(INPUTS + unit), *([take(unit - 1)] if unit else [])]
    backward += [give(ROOT), give(INPUTS), take(INPUTS + ROOT), give(INPUTS + ROOT)]
    passes = [Pass(False, {}, forward), Pass(True, {ROOT: None, last: None}, backward)]
    return passes, nbytes, {buffer for buffer in nbytes if buffer >= INPUTS}


def prefetching(nbytes: dict[int, int], forward: int, backward: int, **other: float) -> Prefetching:
    units = {buffer: size for buffer, size in nbytes.items() if buffer < INPUTS}
    limits = {"max_units": inf, "max_nbytes": inf, **other}
    return Prefetching({unit: unit for unit in units}, units, forward, backward, False, **limits)


def check(needs: Demand, nbytes: dict[int, int], found: dict[int, Place]) -> None:
    assert found.keys() == needs.unplaced
    for buffer, place in found.items():
        assert place.start % ALIGNMENT == 0 <= place.start
        assert place.stop - place.start == nbytes[buffer]
        for other in needs.conflicts[buffer]:
            assert other not in found or not place.overlaps(found[other])


KINDS = {
    "equal": lambda draw: 4 * MB,
    "several sizes": lambda draw: draw.choice([MB, 3 * MB, 8 * MB]),
    "any size": lambda draw: draw.randint(MB // 4, 16 * MB),
    "many magnitudes": lambda draw: int(2 ** draw.uniform(14, 26)),
}


BOUNDS = {0: 1.02, 1: 1.02, 2: 1.02, 3: 1.08}
"""By the number of units that forward prefetches: bytes of a layout over those taken at once. With
three ahead of any size, one of 25 chains is not laid out within 1.02."""


@pytest.mark.parametrize("kind", KINDS)
def test_recorded_orders_take_hardly_more_than_what_is_taken_at_once(kind: str) -> None:
    for seed in range(12):
        draw = random.Random(seed)
        sizes = [KINDS[kind](draw) for _ in range(draw.randint(2, 40))]
        passes, nbytes, inputs = chain(sizes, root=draw.choice([ALIGNMENT, 50 * MB]))
        for depth, bound in BOUNDS.items():
            policy = prefetching(nbytes, depth, min(depth, 1))
            needs = demand([with_prefetch(each, policy) for each in passes], nbytes, {}, inputs)
            found = lay_out(needs, nbytes)
            check(needs, nbytes, found)
            assert max(place.stop for place in found.values()) <= bound * needs.peak


def test_random_takes_and_gives_never_overlap() -> None:
    for seed in range(15):
        draw = random.Random(seed)
        nbytes = {buffer: draw.randint(1, 10_000) for buffer in range(20)}
        places: dict[int, list[Place]] = {}
        borders: list[int] = []
        for _ in range(3):  # Orders that come one after the other.
            taken: set[int] = set()
            events = []
            for _ in range(80):
                buffer = draw.randrange(20)
                events.append(Event(buffer not in taken, buffer))
                taken ^= {buffer}
            needs = demand([Pass(False, {}, events)], nbytes, places)
            found = lay_out(needs, nbytes, borders)
            check(needs, nbytes, found)
            for buffer, place in found.items():
                met = (p for each in needs.conflicts[buffer] for p in needs.used.get(each, ()))
                assert not any(map(place.overlaps, met))
                assert not any(place.start < border < place.stop for border in borders)
            for buffer, place in found.items():
                places.setdefault(buffer, []).append(place)
            if found:
                end = -(-max(place.stop for place in found.values()) // ALIGNMENT) * ALIGNMENT
                borders += [end] if end > max(borders, default=0) else []
            assert not demand([Pass(False, {}, events)], nbytes, places).unplaced


def test_a_place_that_is_free_is_taken_again_and_a_new_order_keeps_it() -> None:
    nbytes = {0: 100, 1: 100, 2: 100}
    first = Pass(False, {}, [take(0), give(0), take(1), give(1)])
    places = {b: [p] for b, p in lay_out(demand([first], nbytes, {}), nbytes).items()}
    assert places == {0: [Place(0, 100)], 1: [Place(0, 100)]}
    both = Pass(False, {}, [take(0), take(1), take(2)])
    needs = demand([both], nbytes, places)
    assert needs.unplaced == {1, 2} and needs.peak == 300
    found = lay_out(needs, nbytes, [ALIGNMENT])
    check(needs, nbytes, found)
    assert all(place.start >= ALIGNMENT for place in found.values())


def test_prefetching_starts_gathers_earlier() -> None:
    passes, nbytes, _ = chain([1, 1, 1, 1], root=1)
    forward, backward = (with_prefetch(each, prefetching(nbytes, 1, 1)).events for each in passes)
    assert list(forward) == [
        *(take(ROOT), take(0), take(1)),
        *(give(0), take(2), give(1), take(3), give(2)),
    ]
    assert list(backward)[:3] == [take(2, True), give(3), take(INPUTS + 3)]
    assert list(backward)[3:7] == [take(1, True), give(2), give(INPUTS + 3), take(INPUTS + 2)]


@pytest.mark.parametrize("limit", [{"max_units": 3}, {"max_nbytes": 3 * MB}])
def test_prefetching_heeds_the_limit(limit: dict[str, float]) -> None:
    passes, nbytes, _ = chain([MB] * 6, root=MB)
    pass_ = with_prefetch(passes[0], prefetching(nbytes, 4, 1, **limit))
    assert demand([pass_], nbytes, {}).peak == 3 * MB
    unlimited = with_prefetch(passes[0], prefetching(nbytes, 4, 1))
    assert demand([unlimited], nbytes, {}).peak == 6 * MB


def test_what_is_taken_behind_reductions_shares_their_inputs_place() -> None:
    nbytes = {0: MB, 1: MB, INPUTS: MB}
    events = [take(INPUTS), take(0), take(1, is_behind=True), give(0), give(INPUTS)]
    needs = demand([Pass(True, {}, events)], nbytes, {}, {INPUTS})
    assert needs.conflicts[1] == {0} and needs.peak == 2 * MB
    # A sum that waits since an earlier pass waits on.
    needs = demand([Pass(True, {INPUTS: None}, events[1:])], nbytes, {}, {INPUTS})
    assert needs.conflicts[1] == {0, INPUTS} and needs.peak == 3 * MB


def test_the_last_of_several_gives_counts() -> None:
    events = [take(0), give(0), take(1), give(0), give(1), take(0), give(0)]
    assert last_gives(events) == [take(0), take(1), give(0), give(1), take(0), give(0)]
