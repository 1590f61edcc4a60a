"""Buffers that come and go are mapped in pages of 2 MiB, where the kernel has them."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch

from layerzero.flat.buffer import is_worth_huge_pages, prefer_huge_pages

_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_NBYTES = 64 << 20


def _faults_of_a_first_touch(advised: bool) -> int:
    buffer = torch.empty(_NBYTES, dtype=torch.uint8)
    if advised:
        prefer_huge_pages(buffer, collapse=False)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    buffer.fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(
    not _SETTING.exists() or "[madvise]" not in _SETTING.read_text(),
    reason="the kernel gives huge pages to all or to none",
)
def test_a_first_touch_of_a_large_buffer_takes_few_page_faults() -> None:
    plain, advised = _faults_of_a_first_touch(False), _faults_of_a_first_touch(True)
    assert plain > 10_000
    assert advised < plain / 10


def test_small_and_memoryless_tensors_are_left_alone() -> None:
    assert is_worth_huge_pages(torch.empty(4 << 20, dtype=torch.uint8))
    assert not is_worth_huge_pages(torch.empty((4 << 20) - 1, dtype=torch.uint8))
    assert not is_worth_huge_pages(torch.empty(4 << 20, dtype=torch.uint8, device="meta"))
    freed = torch.empty(4 << 20, dtype=torch.uint8)
    freed.untyped_storage().resize_(0)
    prefer_huge_pages(freed)
    values = torch.arange(1 << 20)
    prefer_huge_pages(values)
    assert torch.equal(values, torch.arange(1 << 20)), "no value changes"
