"""Reads and writes past the page cache: the same bytes, whatever lies where and is refused."""

from __future__ import annotations

import errno
import math
import os
import random
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from layerzero.checkpoint.file_io import direct_io as direct
from layerzero.checkpoint.file_io.aligned_memory import in_memory
from layerzero.checkpoint.file_io.batches import Transfer
from layerzero.checkpoint.file_io.direct_io import (
    PAGE_NBYTES,
    FileReader,
    FileWriter,
    bytes_of,
    pages,
)
from layerzero.checkpoint.format.inventory import MODEL, Entry
from layerzero.checkpoint.format.safetensors_file import TensorEntry
from layerzero.state_dict.ranges import Extent

MIB = 1 << 20
SIZES = [0, 1, PAGE_NBYTES, 300_000, MIB, MIB + 1, 2 * MIB - 5]


def _cut(data: memoryview, generator: random.Random, parts: int) -> list[memoryview]:
    ends = sorted(generator.randrange(len(data) + 1) for _ in range(parts - 1))
    return [data[a:b] for a, b in zip([0, *ends], [*ends, len(data)], strict=True)]


def _file_of(path: Path, nbytes: int, generator: random.Random) -> bytes:
    content = generator.randbytes(nbytes)
    path.write_bytes(content)
    _forget(path)
    return content


def _forget(path: Path) -> None:
    """Drop it from the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def _nothing_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Systems forget a file when they like: beside other work perhaps not at once."""
    monkeypatch.setattr(FileReader, "_is_cached", lambda reader, offset: False)


def _watch(monkeypatch: pytest.MonkeyPatch, cls: type, method: str) -> list[bool]:
    """What `_read_direct` or `_write_direct` answered."""
    answers: list[bool] = []
    original = getattr(cls, method)

    def watched(*args: Any) -> bool:
        answers.append(original(*args))
        return answers[-1]

    monkeypatch.setattr(cls, method, watched)
    return answers


def _can_go_direct(folder: Path) -> bool:
    (folder / "probe").write_bytes(bytes(PAGE_NBYTES))
    try:
        os.close(os.open(folder / "probe", os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return False
    return True


@pytest.mark.parametrize("nbytes", SIZES)
def test_what_is_written_is_what_is_read(
    tmp_path: Path, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = random.Random(nbytes)
    written = _watch(monkeypatch, FileWriter, "_write_direct")
    read = _watch(monkeypatch, FileReader, "_read_direct")
    path = tmp_path / "file"
    for offset in (0, PAGE_NBYTES, 64, 5003):
        content = bytearray(_file_of(path, offset + nbytes + 7000, generator))
        data = generator.randbytes(nbytes)
        content[offset : offset + nbytes] = data
        memory = memoryview(bytearray(data))
        views = _cut(memory, generator, 5)
        with FileWriter(path, PAGE_NBYTES + 2 * MIB) as writer:
            assert writer.write(views, offset) == [zlib.crc32(view) for view in views]
        assert path.read_bytes() == content, "beside what was written, nothing changed"
        for shift in (offset % PAGE_NBYTES, 8):  # aligned as the file is, and not
            _forget(path)
            fresh = bytes_of(pages(shift + nbytes + 1))[shift : shift + nbytes]
            with FileReader(path) as reader:
                reader.read(_cut(fresh, generator, 5), offset)
            assert fresh == data
    if _can_go_direct(tmp_path) and nbytes >= MIB:
        assert any(written) and any(read)


@pytest.mark.parametrize("offset", [0, 64, 5003])
def test_pages_at_both_ends_are_read_past_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offset: int
) -> None:
    if not _can_go_direct(tmp_path):
        pytest.skip("this file system reads through the cache alone")
    _nothing_is_cached(monkeypatch)
    content = _file_of(tmp_path / "file", MIB + 9000, random.Random(0))
    seen = _reads(monkeypatch)
    before = offset % PAGE_NBYTES
    for nbytes in (MIB + 17, len(content) - offset):  # ends inside the file, and with it
        behind = -(offset + nbytes) % PAGE_NBYTES
        for spare in [(before, behind), (before, 0), (0, behind), (0, 0)]:
            memory = pages(PAGE_NBYTES + before + nbytes + behind + 1).fill_(7)
            begin = PAGE_NBYTES + before
            seen.clear()
            with FileReader(tmp_path / "file") as reader:
                reader.read([bytes_of(memory)[begin : begin + nbytes]], offset, spare)
            assert bytes_of(memory)[begin : begin + nbytes] == content[offset : offset + nbytes]
            assert (memory[: begin - spare[0]] == 7).all(), "only what is spare"
            assert (memory[begin + nbytes + spare[1] :] == 7).all()
            through_the_cache = [before > spare[0], behind > spare[1]]
            assert len(seen) == 1 + sum(through_the_cache)
            _forget(tmp_path / "file")


def _reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Offsets of reads that bring data, as they come; not those that ask about the cache."""
    seen: list[int] = []
    real = os.preadv

    def preadv(descriptor: int, views: Any, offset: int, *flags: int) -> int:
        if not flags:
            seen.append(offset)
        return real(descriptor, views, offset, *flags)

    monkeypatch.setattr(direct.os, "preadv", preadv)
    return seen


def test_ends_inside_a_page_are_written_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not _can_go_direct(tmp_path):
        pytest.skip("this file system writes through the cache alone")
    content = _file_of(tmp_path / "file", 3 * MIB, random.Random(0))
    sizes: list[int] = []
    real = os.pwritev

    def pwritev(descriptor: int, views: Any, offset: int) -> int:
        sizes.append(sum(map(len, views)))
        return real(descriptor, views, offset)

    monkeypatch.setattr(direct.os, "pwritev", pwritev)
    data = memoryview(bytearray(content[::-1]))
    with FileWriter(tmp_path / "file", PAGE_NBYTES + MIB) as writer:
        for begin in (100, MIB, 2 * MIB - 60):
            writer.write([data[begin : begin + MIB - 100]], begin)
        assert all(size % PAGE_NBYTES == 0 for size in sizes) and len(sizes) == 3
    assert sizes[3:] == [PAGE_NBYTES - 100, PAGE_NBYTES - 100, 60, PAGE_NBYTES - 160]
    expected = bytearray(content)
    for begin in (100, MIB, 2 * MIB - 60):
        expected[begin : begin + MIB - 100] = data[begin : begin + MIB - 100]
    assert (tmp_path / "file").read_bytes() == expected


def test_what_the_cache_holds_is_read_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = _watch(monkeypatch, FileReader, "_read_direct")
    content = _file_of(tmp_path / "file", MIB, random.Random(0))
    assert (tmp_path / "file").read_bytes() == content  # and now it is in the cache
    memory = pages(MIB)
    with FileReader(tmp_path / "file") as reader:
        reader.read([bytes_of(memory)], 0)
    assert answers == [False]
    assert bytes_of(memory) == content


def test_a_cached_header_alone_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever reads a file's header leaves the pages behind it in the cache."""
    if not _can_go_direct(tmp_path):
        pytest.skip("this file system reads through the cache alone")
    monkeypatch.setattr(FileReader, "_is_cached", lambda reader, offset: offset < MIB // 8)
    answers = _watch(monkeypatch, FileReader, "_read_direct")
    content = _file_of(tmp_path / "file", MIB, random.Random(0))
    memory = pages(MIB)
    with FileReader(tmp_path / "file") as reader:
        reader.read([bytes_of(memory)], 0)
    assert answers == [True]
    assert bytes_of(memory) == content


@pytest.mark.parametrize("error", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_that_refuses_gets_ordinary_reads_and_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    _nothing_is_cached(monkeypatch)
    content = _file_of(tmp_path / "file", MIB, random.Random(0))
    refused = _refuse(monkeypatch, error)
    with FileWriter(tmp_path / "file", MIB) as writer:
        writer.write([memoryview(bytearray(content[::-1]))], 0)
    assert (tmp_path / "file").read_bytes() == content[::-1]
    _forget(tmp_path / "file")
    memory = pages(MIB)
    with FileReader(tmp_path / "file") as reader:
        reader.read([bytes_of(memory)], 0)
    assert bytes_of(memory) == content[::-1]
    if _can_go_direct(tmp_path):
        assert refused == ["pwritev", "preadv"]


def test_a_full_or_broken_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not _can_go_direct(tmp_path):
        pytest.skip("this file system reads and writes through the cache alone")
    _nothing_is_cached(monkeypatch)
    _file_of(tmp_path / "file", MIB, random.Random(0))
    _refuse(monkeypatch, errno.ENOSPC)
    with (
        pytest.raises(OSError, match="No space left"),
        FileWriter(tmp_path / "file", MIB) as writer,
    ):
        writer.write([memoryview(bytearray(MIB))], 0)
    _refuse(monkeypatch, errno.EIO)
    with pytest.raises(OSError, match="Input/output"), FileReader(tmp_path / "file") as reader:
        reader.read([bytes_of(pages(MIB))], 0)


def _refuse(monkeypatch: pytest.MonkeyPatch, error: int) -> list[str]:
    """Make transfers past the cache fail; returns their names as they come."""
    refused: list[str] = []
    real_open = os.open
    real = {name: getattr(os, name) for name in ("preadv", "pwritev")}
    past_the_cache: set[int] = set()

    def opened(path: Any, flags: int, *args: Any) -> int:
        descriptor = real_open(path, flags, *args)
        past_the_cache.discard(descriptor)
        if flags & os.O_DIRECT:
            past_the_cache.add(descriptor)
        return descriptor

    def moves(name: str) -> Any:
        def move(descriptor: int, *args: Any) -> int:
            if descriptor in past_the_cache:
                refused.append(name)
                raise OSError(error, os.strerror(error))
            return int(real[name](descriptor, *args))

        return move

    monkeypatch.setattr(direct.os, "open", opened)
    for name in real:
        monkeypatch.setattr(direct.os, name, moves(name))
    return refused


def test_a_file_that_ends_too_early_is_an_error(tmp_path: Path) -> None:
    _file_of(tmp_path / "file", MIB, random.Random(0))
    for shift in (0, 8):
        memory = pages(2 * MIB)
        with (
            pytest.raises(OSError, match=f"now ends at byte {MIB}: it was truncated"),
            FileReader(tmp_path / "file") as reader,
        ):
            reader.read([bytes_of(memory)[shift : shift + MIB + 5000]], 0)


def _transfer(
    file: str, begin: int, shape: Sequence[int], sharded_param: tuple[int, int]
) -> Transfer:
    start, stop = sharded_param
    entry = Entry(
        kind=MODEL,
        name="w",
        aliases=(),
        extent=Extent.whole(shape),
        start=start,
        stop=stop,
        tensor=torch.empty(stop - start, device="meta"),
        order=(0, 0),
        is_whole=False,
        announces=False,
        replica=0,
    )
    return Transfer(file, TensorEntry(torch.float32, tuple(shape), begin), 0, entry)


def test_memory_lies_as_the_file_does() -> None:
    half = MIB // 2
    shapes = [(half,), (3, 7), (half,), (half,)]
    begins = [104]
    for shape in shapes:
        begins.append(begins[-1] + 4 * math.prod(shape))
    transfers = [
        _transfer("a", begin, shape, (0, math.prod(shape)))
        for begin, shape in zip(begins[:-1], shapes, strict=True)
    ]
    transfers.append(_transfer("a", begins[-1], (8 * half,), (5, 5 + half)))  # not side by side
    transfers.append(_transfer("b", 96, (half,), (0, half)))  # another file
    transfers.append(_transfer("b", 2, (half,), (0, half)))  # no place for a float32
    transfers.append(_transfer("c", 96, (10,), (0, 10)))  # little
    transfers.append(_transfer("c", 96, (10,), (4, 4)))  # nothing
    lives = ["x"] * 3 + ["y"] + ["x"] * 5
    with_memory = in_memory(transfers, lives)
    placed = [each.entry.tensor for each in with_memory]
    for transfer, tensor in zip(transfers, placed, strict=True):
        assert not tensor.is_meta
        assert tensor.dtype == torch.float32 and tensor.shape == transfer.entry.tensor.shape
        tensor.fill_(1.0)
    places = [*begins[:4], begins[4] + 4 * 5, 96]
    for tensor, place in zip(placed, places, strict=False):
        assert (tensor.data_ptr() - place) % PAGE_NBYTES == 0
    for each in with_memory[: len(places)]:
        memory = each.entry.tensor.untyped_storage()
        start = each.entry.tensor.data_ptr() - memory.data_ptr()
        assert each.spare == (start, memory.nbytes() - start - each.entry.tensor.nbytes)
        assert memory.nbytes() % PAGE_NBYTES == 0, "also the last page is all there"
    assert all(each.spare == (0, 0) for each in with_memory[6:])
    storages = [tensor.untyped_storage().data_ptr() for tensor in placed]
    assert storages[0] == storages[1] == storages[2]
    assert len({storages[index] for index in (0, 3, 4, 5, 6, 7)}) == 6
