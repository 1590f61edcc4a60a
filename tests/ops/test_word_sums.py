"""word_sums: kernel and reference agree, and every single bit counts."""

from __future__ import annotations

import pytest
import torch

from layerzero.ops import reference, word_sums


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


def test_a_table_of_another_size_is_refused() -> None:
    with pytest.raises((ValueError, RuntimeError)):
        torch.ops.layerzero.word_sums_(torch.zeros(3, dtype=torch.int64), [torch.randn(2)])
