"""Ops that add up or check bytes: ordered_sum_ has the bits of a sum in the order of the list, and
word_sums are exact; crc32 is zlib's."""

import zlib
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from layerzero.ops import ordered_sum_
from layerzero.verify.checksums import (
    copy_crc32_,
    crc32,
    run_copy_crc32,
    run_crc32,
    word_sum,
    word_sums,
)
from tests.ops.truth import (
    DTYPES,
    IMPLEMENTATIONS,
    REFUSAL,
    assert_same_bits,
    call,
    narrowed,
    widened,
    with_threads,
)

CANARY = 7.0


def expected(parts: Sequence[torch.Tensor], dtype: torch.dtype, scale: float) -> torch.Tensor:
    total = widened(parts[0].contiguous()).copy()
    with np.errstate(all="ignore"):
        for part in parts[1:]:
            total += widened(part.contiguous())
        if scale != 1.0:
            total *= total.dtype.type(scale)
    return narrowed(total, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("part_dtype", DTYPES, ids=str)
def test_every_dtype_pair_has_the_bits_of_the_contract(
    implementation: str, part_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    for numel, count, scale in [
        (0, 2, 1.0),
        (1, 1, 0.3),
        (513, 2, 0.5),
        (4099, 3, 1 / 3),
        (70, 9, 1.0),
    ]:
        parts = [(torch.randn(numel + 1) * 10**i).to(part_dtype)[1:] for i in range(count)]
        buffer = torch.full((numel + 20,), CANARY, dtype=dtype)
        out = buffer[3 : 3 + numel]
        call(implementation, "ordered_sum_", out, parts, scale)
        assert_same_bits(out, expected(parts, dtype, scale))
        assert (buffer[:3] == CANARY).all() and (buffer[3 + numel :] == CANARY).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_out_may_be_any_of_the_parts(implementation: str, dtype: torch.dtype) -> None:
    part = torch.randn(1200).to(dtype)
    several = [[torch.randn(1200).to(dtype) for _ in range(4)] for _ in range(4)]
    for place, parts in enumerate([*several, [part, part, part]]):
        wanted = expected(parts, dtype, 0.25)
        call(implementation, "ordered_sum_", parts[place % len(parts)], parts, 0.25)
        assert_same_bits(parts[place % len(parts)], wanted)


def test_the_sum_does_not_depend_on_the_number_of_threads(implementation: str) -> None:
    parts = [torch.randn(300_001) * 10**i for i in range(5)]
    wanted = expected(parts, torch.bfloat16, 0.2)
    for _ in with_threads(1, 2, 3):
        out = torch.empty(300_001, dtype=torch.bfloat16)
        call(implementation, "ordered_sum_", out, parts, 0.2)
        assert_same_bits(out, wanted)


def test_parts_of_any_strides_are_read_in_the_order_of_their_shape(implementation: str) -> None:
    parts = [torch.randn(9, 12).t(), torch.randn(12, 18)[:, ::2], torch.randn(108)]
    out = torch.empty(108)
    call(implementation, "ordered_sum_", out, parts, 1.0)
    assert_same_bits(out, expected([part.reshape(-1) for part in parts], torch.float32, 1.0))


@pytest.mark.skipif("kernel" not in IMPLEMENTATIONS, reason="no native kernels")
def test_bad_input_is_refused_with_its_values_and_nothing_is_written() -> None:
    buffer = torch.zeros(32)
    freed = torch.ones(8)
    freed.untyped_storage().resize_(0)
    one = torch.ones(8)
    for parts, text in (
        ([], "at least one part"),
        ([one, torch.ones(7)], "part 1 has 7 elements, out has 8"),
        ([one, one.bfloat16()], r"float32 \(part 0\) and (torch\.)?bfloat16 \(part 1\)"),
        ([one.int()], "part 0 must be"),
        ([one, buffer[4:12]], "out overlaps part 1: bytes"),
        ([buffer.view(torch.bfloat16)[:8]], "out overlaps part 0: bytes"),
        ([freed], "part 0 holds 0 bytes, the tensor needs 32"),
    ):
        with pytest.raises(REFUSAL, match=text):
            call("kernel", "ordered_sum_", buffer[:8], parts, 1.0)
        assert not buffer.any()
    sums = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(REFUSAL, match="room for 1 contiguous int64 checksums, got 3"):
        call("kernel", "word_sums_", sums, [one])
    assert not sums.any()


def test_the_wrapper_returns_out_moves_its_version_and_adds_complex_parts_in_order() -> None:
    for dtype in (torch.float32, torch.complex64):
        parts = [torch.randn(5, dtype=dtype) for _ in range(3)]
        wanted = ((parts[0] + parts[1]) + parts[2]) * 0.5
        for out in (torch.empty(5, dtype=dtype), parts[0]):
            version = out._version
            assert ordered_sum_(out, parts, 0.5) is out
            assert torch.equal(out, wanted) and out._version > version


def _true_sum(tensor: torch.Tensor) -> int:
    data = bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())
    words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]
    total = sum(words) % 2**64
    return total - 2**64 if total >= 2**63 else total


TENSORS = [
    torch.randn(1000),
    torch.randn(1001)[1:],
    torch.randn(7, 3).t(),
    torch.randn(13, dtype=torch.bfloat16)[2:],
    torch.randint(-(2**63), 2**63 - 1, (77,)),
    torch.randint(256, (5,), dtype=torch.uint8),
    torch.tensor(3.5),
    torch.empty(0),
    torch.randn(3, dtype=torch.complex64),
    torch.randn(300_001),
]


def test_sums_of_words_are_right() -> None:
    expected = [_true_sum(tensor) for tensor in TENSORS]
    assert word_sums(TENSORS).tolist() == expected
    assert [int(word_sum(tensor.contiguous())) for tensor in TENSORS] == expected


@pytest.mark.parametrize("op", [run_crc32, crc32])
def test_every_length_and_alignment_gives_what_zlib_gives(op: object) -> None:
    assert callable(op)
    data = torch.randint(0, 256, (70_000,), dtype=torch.uint8)
    for numel in (*range(200), 1023, 4096, 69_990):
        for offset in (0, 1, 7):
            part = data[offset : offset + numel]
            for before in (0, 0x12345678, 0xFFFFFFFF):
                assert op(part, before) == zlib.crc32(part.numpy().tobytes(), before)
    assert op(data[:50_000].view(500, 100)) == zlib.crc32(data[:50_000].numpy().tobytes())


@pytest.mark.parametrize("op", [run_copy_crc32, copy_crc32_])
def test_a_copy_has_the_same_bytes_and_what_zlib_gives(op: object) -> None:
    assert callable(op)
    data = torch.randint(0, 256, (70_000,), dtype=torch.uint8)
    for numel in (0, 1, 63, 64, 255, 256, 4099, 1 << 14, (1 << 14) + 1, 69_990):
        for offset, shift in ((0, 0), (1, 0), (7, 3)):
            part = data[offset : offset + numel]
            memory = torch.full((80_000,), 5, dtype=torch.uint8)
            out = memory[shift : shift + numel]
            assert op(out, part) == zlib.crc32(part.numpy().tobytes())
            assert torch.equal(out, part)
            assert (memory[:shift] == 5).all() and (memory[shift + numel :] == 5).all()


@pytest.mark.skipif(not IMPLEMENTATIONS[1:], reason="no native kernels")
def test_bytes_that_cannot_be_read_or_copied_are_refused() -> None:
    data = torch.arange(100, dtype=torch.uint8)
    refused: list[tuple[Callable[..., object], tuple[object, ...], str]] = [
        *((run_crc32, (data, value), "expected a CRC-32 before it") for value in (-1, 1 << 32)),
        (
            run_copy_crc32,
            (torch.zeros(50, dtype=torch.uint8), data),
            "out has 50 bytes, data has 100",
        ),
    ]
    for bad in (torch.zeros(100), torch.zeros(200, dtype=torch.uint8)[::2]):
        refused += [(run_crc32, (bad,), "expected contiguous uint8")]
        for given in ((bad, data), (data, bad)):
            refused += [(run_copy_crc32, given, "copy_crc32_: expected contiguous uint8")]
    for given in ((data[:60], data[40:]), (data[40:], data[:60]), (data, data)):
        refused += [(run_copy_crc32, given, "copy_crc32_: out and data overlap")]
    for op, arguments, text in refused:
        with pytest.raises(REFUSAL, match=text):
            op(*arguments)
    assert (data == torch.arange(100, dtype=torch.uint8)).all()
