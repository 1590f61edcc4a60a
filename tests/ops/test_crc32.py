"""crc32 and copy_crc32_: the kernels and the references are zlib's."""

from __future__ import annotations

import zlib

import pytest
import torch

from layerzero.ops import copy_crc32_, crc32, reference


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


@pytest.mark.parametrize("op", [copy_crc32_, reference.copy_crc32_])
def test_a_copy_that_cannot_be_is_refused(op: object) -> None:
    assert callable(op)
    data = torch.arange(100, dtype=torch.uint8)
    for bad in (torch.zeros(100), torch.zeros(200, dtype=torch.uint8)[::2]):
        with pytest.raises(ValueError, match="copy_crc32_: expected contiguous uint8"):
            op(bad, data)
        with pytest.raises(ValueError, match="copy_crc32_: expected contiguous uint8"):
            op(data, bad)
    with pytest.raises(ValueError, match="out has 50 bytes, data has 100"):
        op(torch.zeros(50, dtype=torch.uint8), data)
    for out, source in ((data[:60], data[40:]), (data[40:], data[:60]), (data, data)):
        with pytest.raises(ValueError, match="copy_crc32_: out and data overlap"):
            op(out, source)
    assert (data == torch.arange(100, dtype=torch.uint8)).all()
