"""checked_sum_: the bits of ordered_sum_, and the checksums of word_sums."""

from __future__ import annotations

import pytest
import torch

from layerzero.ops import checked_sum_, ordered_sum_, word_sums
from tests.ops.truth import DTYPES, assert_same_bits, call, with_threads


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


def test_what_does_not_fit_is_refused(implementation: str) -> None:
    source, out = torch.randn(10), torch.full((10,), 7.0)
    with pytest.raises(ValueError, match="checksums"):
        call(implementation, "checked_sum_", out, torch.zeros(3).long(), [source], 1.0)
    assert (out == 7).all()


def test_opcheck_passes() -> None:
    sums, out = torch.zeros(2, dtype=torch.int64), torch.empty(10)
    parts = [torch.randn(10), torch.randn(10)]
    torch.library.opcheck(torch.ops.layerzero.checked_sum_.default, (out, sums, parts, 0.5))
    torch.library.opcheck(torch.ops.layerzero.word_sums_.default, (sums, parts))
