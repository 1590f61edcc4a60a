"""pack_: kernel and plain-torch reference against an independent computation, bit by bit."""

import ctypes
import itertools
import mmap
import random
import re
from collections.abc import Sequence

import pytest
import torch

from layerzero.ops import Segments, pack_
from tests.harness.checks import named
from tests.ops.truth import (
    DTYPES,
    IMPLEMENTATIONS,
    REFUSAL,
    assert_same_bits,
    call,
    concatenate,
    narrowed,
    random_values,
    scaled,
    special_values,
    with_threads,
)

CANARY = 7.0
SCALES = [1.0, 0.3, -1.5]


def expected(
    srcs: Sequence[torch.Tensor], segs: torch.Tensor, dtype: torch.dtype, scale: float
) -> torch.Tensor:
    table = segs.tolist()
    sharded_params = []
    for (index, offset, start), (_, _, stop) in itertools.pairwise(table):
        if index < 0 or not srcs[index].numel():
            sharded_params.append(torch.zeros(stop - start, dtype=dtype))
        else:
            values = srcs[index].contiguous().view(-1)[offset : offset + stop - start]
            sharded_params.append(narrowed(scaled(values, scale), dtype))
    return torch.cat(sharded_params) if sharded_params else torch.empty(0, dtype=dtype)


def check(
    implementation: str,
    srcs: Sequence[torch.Tensor],
    segs: torch.Tensor,
    dtype: torch.dtype,
    scale: float,
    out_offset: int = 0,
    nt: bool = False,
) -> None:
    """Pack into the middle of a larger buffer, so that a write outside of `out` shows."""
    numel = int(segs[-1, 2])
    buffer = torch.full((out_offset + numel + 32,), CANARY, dtype=dtype)
    out = buffer[out_offset : out_offset + numel]
    before = [src.clone() for src in srcs]
    call(implementation, "pack_", out, list(srcs), segs, scale, nt)
    assert_same_bits(out, expected(srcs, segs, dtype, scale))
    assert (buffer[:out_offset] == CANARY).all() and (buffer[out_offset + numel :] == CANARY).all()
    for src, copy in zip(srcs, before, strict=True):
        assert_same_bits(src, copy)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("src_dtype", DTYPES, ids=str)
def test_every_dtype_pair_has_the_bits_of_the_contract(
    implementation: str, src_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    numels = [0, 1, 7, 8, 9, 63, 64, 65, 1000, 4097]
    segs = concatenate(numels, alignment=16, multiple=64).table
    for scale in SCALES:
        srcs = [random_values(numel, src_dtype) for numel in numels]
        check(implementation, srcs, segs, dtype, scale)
        check(implementation, srcs, segs, dtype, scale, out_offset=3, nt=True)
    for src in special_values(src_dtype, dtype):
        check(implementation, [src], concatenate([src.numel()]).table, dtype, 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("src_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_any_kind_follow_each_other(
    implementation: str, src_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    """The kernel fetches the next row while it converts one: longer, shorter, elsewhere, none."""
    generator = random.Random(2)
    numels = [5000, 3, 0, 1024, 1024, 1023, 20_000, 64, 0, 0, 0, 2048, 6144, 1]
    for _ in range(8):
        generator.shuffle(numels)
        srcs = [torch.randn(numel).to(src_dtype) for numel in numels]
        turned = numels.index(6144)
        srcs[turned] = srcs[turned].view(64, 96).t()
        for alignment in (1, 32):
            segs = concatenate(numels, alignment, 64).table
            scale, nt = generator.choice(SCALES), generator.random() < 0.5
            shift = generator.randrange(3)
            check(implementation, srcs, segs, dtype, scale, out_offset=shift, nt=nt)
    # Rows without elements, which Segments drops, before, between and behind the others.
    rows = [(0, 0, 0), (0, 0, 0), (-1, 0, 5), (0, 5, 5), (0, 5, 8), (1, 0, 8), (1, 0, 10)]
    segs = torch.tensor([*rows, (-1, 0, 10)], dtype=torch.int64)
    srcs = [torch.randn(numel).to(src_dtype) for numel in (8, 2)]
    check(implementation, srcs, segs, dtype, 1.0)


def test_nothing_is_read_past_the_end_of_a_source(implementation: str) -> None:
    """Sources that end where memory ends: a load past it, unlike a prefetch, ends the process."""
    libc, page = ctypes.CDLL(None, use_errno=True), mmap.PAGESIZE
    maps = [mmap.mmap(-1, 2 * page) for _ in range(3)]
    srcs = []
    for number, (memory, numel) in enumerate(zip(maps, (3, page // 4, 17), strict=True)):
        behind = torch.frombuffer(memory, dtype=torch.uint8, offset=page)
        # 0: no access at all.
        assert libc.mprotect(ctypes.c_void_p(behind.data_ptr()), page, 0) == 0
        src = torch.frombuffer(memory, dtype=torch.float32, count=numel, offset=page - 4 * numel)
        srcs.append(src.fill_(number + 0.5))
    for order in itertools.permutations(srcs):
        segs = concatenate([src.numel() for src in order], alignment=8).table
        for dtype in (torch.float32, torch.bfloat16):
            for nt in (False, True):
                check(implementation, order, segs, dtype, 1.0, nt=nt)


# The reference asks for addresses in Python, which knows of no other than one to write.
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[1:])
def test_a_source_that_shares_its_memory_lazily_goes_on_sharing(implementation: str) -> None:
    """A source is only read: asking for its memory to write would copy it."""
    segs = concatenate([100]).table
    src = torch._lazy_clone(torch.ones(100))
    out = torch.zeros(100)
    call(implementation, "pack_", out, [src], segs, 2.0, False)
    assert torch._C._is_cow_tensor(src) and (out == 2).all()


def test_odd_layouts_pack(implementation: str) -> None:
    """Any number of sources; odd starts, chunks of a source in any order, gaps, sources used twice
    or not at all."""
    for count in (0, 1, 33, 449, 2000, 4001):
        numels = [random.randrange(0, 40) for _ in range(count)]
        segs = concatenate(numels, alignment=8, multiple=24).table
        flat = torch.randn(sum(numels) + 1, dtype=torch.float32)[1:].to(torch.bfloat16)
        check(implementation, list(flat.split(numels)), segs, torch.float32, 0.5)
    for srcs in ([], [torch.empty(0)], [torch.ones(3)]):
        check(implementation, srcs, Segments.build([], 0).table, torch.float32, 1.0)
    generator = random.Random(1)
    for _ in range(60):
        numels = [generator.choice([0, 1, 3, 50, 300, 5000]) for _ in range(6)]
        rows, end = [], 0
        for _ in range(generator.randrange(12)):
            source = generator.randrange(-1, 6)
            length = numels[source] if source >= 0 and numels[source] else 100
            offset = generator.randrange(length)
            count = generator.randrange(length - offset + 1)
            end += generator.choice([0, 0, 1, 17])
            rows.append((source, offset, end, count))
            end += count
        segs = Segments.build(rows, end + generator.randrange(5)).table
        src_dtype, dtype = generator.choice(DTYPES), generator.choice(DTYPES)
        shift = generator.randrange(4)
        srcs = [torch.randn(numel + shift).to(src_dtype)[shift:] for numel in numels]
        scale, nt = generator.choice(SCALES), generator.random() < 0.3
        check(implementation, srcs, segs, dtype, scale, out_offset=shift, nt=nt)


def test_threads_meet_without_a_seam(implementation: str) -> None:
    numels = [100_003, 1, 40_000, 17, 77_777]
    segs = concatenate(numels, alignment=32, multiple=64).table
    srcs = [torch.randn(numel).to(torch.bfloat16) for numel in numels]
    srcs[2] = torch.empty(0, dtype=torch.float64)
    for _ in with_threads(1, 2, 3, 5):
        check(implementation, srcs, segs, torch.float32, 0.3, out_offset=1)
        check(implementation, srcs, segs, torch.float32, 0.3, nt=True)


def test_sources_of_any_strides_are_read_in_the_order_of_their_shape(implementation: str) -> None:
    for rows, cols in ((3, 5), (64, 64), (65, 130), (1, 9), (9, 1), (700, 301)):
        src, numel = torch.randn(cols, rows).t(), rows * cols
        for dtype in (torch.float32, torch.bfloat16):
            check(implementation, [src], concatenate([numel]).table, dtype, 0.3)
            middle = Segments.build([(0, numel // 3, 2, numel // 2)], numel).table
            check(implementation, [src], middle, dtype, 1.0)
    base = torch.randn(6, 10, 8)
    srcs = [base.permute(2, 0, 1), base[:, ::2, 1:], base[0, 0].expand(5, 8), base[1, 2, 3]]
    segs = concatenate([src.numel() for src in srcs], alignment=4).table
    check(implementation, srcs, segs, torch.bfloat16, 0.3)


def test_what_is_missing_is_zero_even_where_the_scale_is_not_finite(implementation: str) -> None:
    segs = Segments.build([(0, 0, 1, 3), (-1, 0, 4, 2), (1, 0, 6, 2)], 9).table
    for scale in (-1.0, torch.inf, torch.nan):
        check(implementation, [torch.ones(3), torch.empty(0)], segs, torch.float32, scale)


def _bad_calls() -> dict[str, tuple[dict[str, object], str]]:
    """What to change in a good call, and what the text must name."""
    buffer = torch.zeros(64)
    freed = torch.ones(8)
    freed.untyped_storage().resize_(0)

    def table(*rows: tuple[int, int, int]) -> torch.Tensor:
        return torch.tensor(rows, dtype=torch.int64)

    big = (1 << 63) - 1
    return {
        "source dtypes differ": (
            {"srcs": [torch.ones(8), torch.ones(8).half()]},
            r"float32 \(source 0\) and (torch\.)?float16 \(source 1\)",
        ),
        "output of integers": ({"out": torch.zeros(16).int()}, "out must be float32"),
        "out overlaps a source": (
            {"out": buffer[:16], "srcs": [buffer[12:20], torch.ones(8)]},
            "out overlaps source 0: bytes",
        ),
        "out too small": ({"out": torch.zeros(12)}, "cover 16 elements, out has 12"),
        "out not contiguous": ({"out": torch.zeros(32)[::2]}, "out must be contiguous"),
        "too few sources": ({"srcs": [torch.ones(8)]}, "source 1, there are 1"),
        "source too short": (
            {"srcs": [torch.ones(8), torch.ones(7)]},
            "8 elements from 0 of source 1, which has 7",
        ),
        "segs of int32": ({"segs": table((0, 0, 0), (0, 0, 16)).int()}, r"int64 \[S \+ 1, 3\]"),
        "segs without a sentinel": ({"segs": torch.zeros(0, 3, dtype=torch.int64)}, r"\[0, 3\]"),
        "destinations fall": (
            {"segs": table((0, 0, 0), (1, 0, 8), (0, 0, 4), (-1, 0, 16))},
            "row 1 begins at 8 and row 2 at 4",
        ),
        "negative offset": (
            {"segs": table((0, -1, 0), (1, 0, 8), (-1, 0, 16))},
            "from -1 of source 0, which has 8",
        ),
        "offset overflows": (
            {"segs": table((0, big, 0), (1, 0, 8), (-1, 0, 16))},
            f"from {big} of source 0, which has 8",
        ),
        "memory of a source was freed": (
            {"srcs": [torch.ones(8), freed]},
            "source 1 holds 0 bytes, the tensor needs 32",
        ),
    }


@pytest.mark.skipif("kernel" not in IMPLEMENTATIONS, reason="no native kernels")
def test_bad_input_is_refused_with_its_values_and_nothing_is_written() -> None:
    good = {"out": torch.zeros(16), "srcs": [torch.ones(8)] * 2, "segs": concatenate([8, 8]).table}
    for name, (change, text) in _bad_calls().items():
        arguments = {**good, **change}
        with named(name), pytest.raises(REFUSAL, match=text):
            call("kernel", "pack_", *arguments.values(), 1.0, False)
        assert not arguments["out"].any()


def test_the_wrapper_writes_as_torch_does_and_reads_parameters_without_autograd() -> None:
    segs = concatenate([2, 3, 1], alignment=4)
    out = torch.full((segs.numel,), CANARY)
    loss = (torch.ones(9, requires_grad=True) * out).sum()
    parameter = torch.nn.Parameter(torch.ones(1))
    assert pack_(out, [torch.ones(2), torch.empty(0), parameter], segs, 0.5) is out
    assert out.tolist() == [0.5, 0.5, 0, 0, 0, 0, 0, 0, 0.5] and not out.requires_grad
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.inference_mode():
        pack_(torch.empty(3), [torch.zeros(3)], concatenate([3]))
    with pytest.raises(ValueError, match="cover 9 elements, out has 5"):
        pack_(torch.empty(5), [torch.ones(2), torch.empty(0), parameter], segs)


def test_bad_rows_are_refused() -> None:
    first, rows = (0, 0, 4, 2), [(1, 0, 5, 2), (1, 0, 0, 2), (0, 0, 6, 9)]
    for row in (*rows, (0, -1, 6, 1), (0, 0, 6, -1), (-2, 0, 6, 1)):
        with pytest.raises(AssertionError, match=re.escape(f"row {(1, *row)}")):
            Segments.build([first, row], 8)


def test_dtypes_without_arithmetic_are_moved_as_they_are() -> None:
    segs = Segments.build([(1, 1, 1, 2), (0, 0, 4, 3)], 8)
    for dtype in (torch.int64, torch.complex64, torch.bool):
        srcs = [torch.ones(3, dtype=dtype), torch.tensor([0, 1, 1]).to(dtype)]
        out = torch.ones(8, dtype=dtype)
        before = out._version
        assert pack_(out, srcs, segs) is out
        assert out.tolist() == torch.tensor([0, 1, 1, 0, 1, 1, 1, 0]).to(dtype).tolist()
        assert out._version > before
