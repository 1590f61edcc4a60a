"""Ops that add up or check bytes: ordered_sum_ has the bits of a sum in the order of the list,
checked_sum_ those and the checksums of word_sums, where every bit counts, and crc32 is zlib's."""

import zlib
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from layerzero.ops import checked_sum_, copy_crc32_, crc32, ordered_sum_, reference, word_sums
from tests.ops.truth import (
    DTYPES,
    IMPLEMENTATIONS,
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
def test_out_may_be_any_one_of_the_parts(implementation: str, dtype: torch.dtype) -> None:
    for place in range(4):
        parts = [torch.randn(1200).to(dtype) for _ in range(4)]
        wanted = expected(parts, dtype, 0.25)
        call(implementation, "ordered_sum_", parts[place], parts, 0.25)
        assert_same_bits(parts[place], wanted)


def test_one_tensor_may_be_several_parts(implementation: str) -> None:
    part = torch.randn(700)
    wanted = expected([part, part, part], torch.float32, 1.0)
    call(implementation, "ordered_sum_", part, [part, part, part], 1.0)
    assert_same_bits(part, wanted)


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


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[1:])
@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("none", "at least one part"),
        ("size", "part 1 has 7 elements, out has 8"),
        ("dtype", r"float32 \(part 0\) and (torch\.)?bfloat16 \(part 1\)"),
        ("integers", "part 0 must be"),
        ("shifted", "out overlaps part 1: bytes"),
        ("other dtype", "out overlaps part 0: bytes"),
        ("freed", "part 0 holds 0 bytes, the tensor needs 32"),
    ],
)
def test_bad_input_is_refused_with_its_values_and_nothing_is_written(
    implementation: str, case: str, text: str
) -> None:
    buffer = torch.zeros(32)
    freed = torch.ones(8)
    freed.untyped_storage().resize_(0)
    out = buffer[:8]
    one = torch.ones(8)
    parts = {
        "none": [],
        "size": [one, torch.ones(7)],
        "dtype": [one, one.bfloat16()],
        "integers": [one.int()],
        "shifted": [one, buffer[4:12]],
        "other dtype": [buffer.view(torch.bfloat16)[:8]],
        "freed": [freed],
    }[case]
    with pytest.raises(ValueError, match=text):
        call(implementation, "ordered_sum_", out, parts, 1.0)
    assert not buffer.any()


def test_the_wrapper_returns_out_and_moves_its_version() -> None:
    out = torch.empty(2)
    version = out._version
    assert ordered_sum_(out, [torch.ones(2), torch.ones(2)], 0.5) is out
    assert out.tolist() == [1, 1] and out._version > version


def test_opcheck_passes() -> None:
    parts = [torch.randn(40) for _ in range(3)]
    for out in (torch.zeros(40), torch.zeros(40, dtype=torch.bfloat16)):
        torch.library.opcheck(torch.ops.layerzero.ordered_sum_.default, (out, parts, 0.5))


def test_a_compiled_graph_holds_the_op_whole() -> None:
    def step(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        torch.ops.layerzero.ordered_sum_(out, [a + 1, b], 0.5)
        return out * 2

    a, b = torch.randn(9), torch.randn(9)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(torch.zeros(9), a, b), step(torch.zeros(9), a, b))


def test_complex_parts_are_added_in_order() -> None:
    parts = [torch.randn(5, dtype=torch.complex64) for _ in range(3)]
    wanted = ((parts[0] + parts[1]) + parts[2]) * 0.5
    out = ordered_sum_(torch.empty(5, dtype=torch.complex64), parts, 0.5)
    assert torch.equal(out, wanted)
    assert torch.equal(ordered_sum_(parts[0], parts, 0.5), wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("part_dtype", DTYPES, ids=str)
def test_sums_with_checksums(
    implementation: str, part_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    for numel, count, skip in [(0, 2, 0), (1, 1, 0), (2049, 2, 1), (70_003, 3, -1)]:
        parts = [torch.randn(numel + 1).to(part_dtype)[1:] for _ in range(count)]
        wanted = ordered_sum_(torch.empty(numel, dtype=dtype), parts, 0.5)
        sums = word_sums(parts)
        sums[skip if skip >= 0 else slice(0, 0)] = 0
        got = torch.full((count,), 9)
        # Into a part, where that is possible: its checksum is that of what was received.
        out = parts[0] if dtype == part_dtype else torch.empty(numel, dtype=dtype)
        call(implementation, "checked_sum_", out, got, parts, 0.5, skip)
        assert_same_bits(out, wanted)
        assert got.tolist() == sums.tolist()


def test_threads_add_up_to_the_same_checksums() -> None:
    parts = list(torch.randn(600_000).chunk(2))
    results = [checked_sum_(torch.empty(300_000), parts).tolist() for _ in with_threads(1, 2, 3)]
    assert results[0] == results[1] == results[2]


def test_other_dtypes_have_checksums_too() -> None:
    parts = [torch.randn(9, dtype=torch.complex64) for _ in range(3)]
    wanted = word_sums(parts)
    assert checked_sum_(torch.empty_like(parts[0]), parts, skip=0)[1:].equal(wanted[1:])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[1:])
def test_what_does_not_fit_is_refused(implementation: str) -> None:
    source, out = torch.randn(10), torch.full((10,), 7.0)
    with pytest.raises(ValueError, match="checksums"):
        call(implementation, "checked_sum_", out, torch.zeros(3).long(), [source], 1.0)
    assert (out == 7).all()


def test_opcheck_passes_for_checksums() -> None:
    sums, out = torch.zeros(2, dtype=torch.int64), torch.empty(10)
    parts = [torch.randn(10), torch.randn(10)]
    torch.library.opcheck(torch.ops.layerzero.checked_sum_.default, (out, sums, parts, 0.5))
    torch.library.opcheck(torch.ops.layerzero.word_sums_.default, (sums, parts))


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
    assert [int(reference.word_sum(tensor.contiguous())) for tensor in TENSORS] == expected


@pytest.mark.parametrize("numel", [1, 5, 40])
def test_each_single_bit_changes_the_sum(numel: int) -> None:
    tensor = torch.randn(numel)
    before = word_sums([tensor])
    bits = tensor.view(torch.uint8)
    for bit in range(8 * bits.numel()):
        bits[bit // 8] ^= 1 << bit % 8
        assert word_sums([tensor]) != before
        bits[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize("op", [crc32, reference.crc32])
def test_every_length_and_alignment_gives_what_zlib_gives(op: object) -> None:
    assert callable(op)
    data = torch.randint(0, 256, (70_000,), dtype=torch.uint8)
    for numel in (*range(200), 1023, 4096, 69_990):
        for offset in (0, 1, 7):
            part = data[offset : offset + numel]
            for before in (0, 0x12345678, 0xFFFFFFFF):
                assert op(part, before) == zlib.crc32(part.numpy().tobytes(), before)
    assert op(data[:50_000].view(500, 100)) == zlib.crc32(data[:50_000].numpy().tobytes())


@pytest.mark.skipif(not IMPLEMENTATIONS[1:], reason="no native kernels")
def test_what_is_no_run_of_bytes_is_refused() -> None:
    for bad in (torch.zeros(4), torch.zeros(8, dtype=torch.uint8)[::2]):
        with pytest.raises(ValueError, match="expected contiguous uint8"):
            crc32(bad)
    for value in (-1, 1 << 32):
        with pytest.raises(ValueError, match="expected a CRC-32 before it"):
            crc32(torch.zeros(1, dtype=torch.uint8), value)


@pytest.mark.parametrize("op", [copy_crc32_, reference.copy_crc32_])
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
def test_a_copy_that_cannot_be_is_refused() -> None:
    data = torch.arange(100, dtype=torch.uint8)
    for bad in (torch.zeros(100), torch.zeros(200, dtype=torch.uint8)[::2]):
        with pytest.raises(ValueError, match="copy_crc32_: expected contiguous uint8"):
            copy_crc32_(bad, data)
        with pytest.raises(ValueError, match="copy_crc32_: expected contiguous uint8"):
            copy_crc32_(data, bad)
    with pytest.raises(ValueError, match="out has 50 bytes, data has 100"):
        copy_crc32_(torch.zeros(50, dtype=torch.uint8), data)
    for out, source in ((data[:60], data[40:]), (data[40:], data[:60]), (data, data)):
        with pytest.raises(ValueError, match="copy_crc32_: out and data overlap"):
            copy_crc32_(out, source)
    assert (data == torch.arange(100, dtype=torch.uint8)).all()
