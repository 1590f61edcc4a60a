"""checked_pack_, checked_sum_: bits of pack_ and ordered_sum_, checksums of word_sums."""

from __future__ import annotations

import pytest
import torch

from layerzero.ops import (
    Segments,
    checked,
    checked_pack_,
    checked_sum_,
    ordered_sum_,
    pack_,
    word_sums,
)
from tests.ops.truth import DTYPES, IMPLEMENTATIONS, assert_same_bits, baseline

IDS = {"ids": str}


def _call(implementation: str, op: str, *args: object) -> None:
    if implementation == "reference":
        getattr(checked, op)(*args)
        return
    with baseline(implementation == "baseline"):
        getattr(torch.ops.layerzero, op).default(*args)


def _sources(dtype: torch.dtype) -> tuple[list[torch.Tensor], Segments]:
    """With a missing one, a transposed one, gaps, and rows that begin amid a word."""
    sources = [
        torch.randn(5).to(dtype),
        torch.randn(40, 700).to(dtype).t(),
        torch.empty(0),
        torch.randn(20_011).to(dtype)[1:],
    ]
    rows = [(0, 0, 1, 5), (1, 0, 7, 28_000), (2, 0, 28_007, 90), (3, 10, 28_100, 20_000)]
    return sources, Segments.build(rows, 48_120)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES, **IDS)
@pytest.mark.parametrize("source_dtype", DTYPES, **IDS)
def test_packing_with_checksums(
    implementation: str, source_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    sources, segs = _sources(source_dtype)
    # 48_120 / 3 bfloat16 elements are whole words, 48_120 / 8 are not.
    for num_chunks, skip, scale, past_cache in [
        (1, -1, 1.0, False),
        (3, 1, 0.3, False),
        (3, 0, 1.0, True),
        (8, 2, 1.0, False),
        (8, -1, 0.5, True),
    ]:
        for used in (sources, [each.contiguous() for each in sources]):
            wanted = torch.empty(segs.numel, dtype=dtype)
            pack_(wanted, used, segs, scale)
            sums = word_sums(wanted.chunk(num_chunks))
            sums[skip if skip >= 0 else slice(0, 0)] = 0
            for start in (0, 3):  # also from an address that is no multiple of a word
                out = torch.full((segs.numel + 8,), 7.0, dtype=dtype)[start : start + segs.numel]
                got = torch.full((num_chunks,), 9)
                arguments = (out, got, used, segs.table, scale, skip, past_cache)
                _call(implementation, "checked_pack_", *arguments)
                assert_same_bits(out, wanted)
                assert got.tolist() == sums.tolist()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES, **IDS)
@pytest.mark.parametrize("part_dtype", DTYPES, **IDS)
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
        _call(implementation, "checked_sum_", out, got, parts, 0.5, skip)
        assert_same_bits(out, wanted)
        assert got.tolist() == sums.tolist()


def test_threads_add_up_to_the_same_checksums() -> None:
    sources = [torch.randn(300_001), torch.randn(600, 500).t()]
    segs = Segments.concatenate([each.numel() for each in sources], multiple=8)
    results = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            out = torch.empty(segs.numel)
            sums = checked_pack_(out, sources, segs, 4)
            parts = [out[:300_000], out[300_000:600_000]]
            results.append([sums.tolist(), checked_sum_(torch.empty(300_000), parts).tolist()])
    finally:
        torch.set_num_threads(threads)
    assert results[0] == results[1] == results[2]


def test_other_dtypes_have_checksums_too() -> None:
    segs = Segments.build([(0, 1, 2, 10)], 16)
    source = torch.randint(-9, 9, (12,))
    out = torch.empty(16, dtype=torch.int64)
    sums = checked_pack_(out, [source], segs, 2, skip=1)
    assert sums.tolist() == [int(out[:8].sum()), 0]
    parts = [torch.randn(9, dtype=torch.complex64) for _ in range(3)]
    wanted = word_sums(parts)
    assert checked_sum_(torch.empty_like(parts[0]), parts, skip=0)[1:].equal(wanted[1:])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_what_does_not_fit_is_refused(implementation: str) -> None:
    segs = Segments.concatenate([10])
    source, out = torch.randn(10), torch.full((10,), 7.0)
    for sums in (torch.zeros(3, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)):
        with pytest.raises(ValueError, match="equal chunks"):
            _call(implementation, "checked_pack_", out, sums, [source], segs.table, 1.0)
    with pytest.raises(ValueError, match="checksums"):
        _call(implementation, "checked_sum_", out, torch.zeros(3).long(), [source], 1.0)
    assert (out == 7).all()


def test_opcheck_passes() -> None:
    segs = Segments.concatenate([10])
    sums, out = torch.zeros(2, dtype=torch.int64), torch.empty(10)
    arguments = (out, sums, [torch.randn(10)], segs.table, 1.0)
    torch.library.opcheck(torch.ops.layerzero.checked_pack_.default, arguments)
    parts = [torch.randn(10), torch.randn(10)]
    torch.library.opcheck(torch.ops.layerzero.checked_sum_.default, (out, sums, parts, 0.5))
    torch.library.opcheck(torch.ops.layerzero.word_sums_.default, (sums, parts))
