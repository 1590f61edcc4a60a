"""crc32: the kernel and the reference are zlib's."""

from __future__ import annotations

import zlib

import pytest
import torch

from layerzero.ops import crc32, reference


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


@pytest.mark.parametrize("op", [crc32, reference.crc32])
def test_what_is_no_run_of_bytes_is_refused(op: object) -> None:
    assert callable(op)
    for bad in (torch.zeros(4), torch.zeros(8, dtype=torch.uint8)[::2]):
        with pytest.raises(ValueError, match="expected contiguous uint8"):
            op(bad)
    for value in (-1, 1 << 32):
        with pytest.raises(ValueError, match="expected a CRC-32 before it"):
            op(torch.zeros(1, dtype=torch.uint8), value)
