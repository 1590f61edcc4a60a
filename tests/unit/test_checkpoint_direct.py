"""Reads and writes past the page cache: the same bytes, whatever lies where and is refused."""

from __future__ import annotations

import errno
import math
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from layerzero.checkpoint.file_io import direct_io as direct
from layerzero.checkpoint.file_io.direct_io import (
    PAGE_NBYTES,
    FileReader,
    FileWriter,
    bytes_of,
    pages,
)
from layerzero.checkpoint.file_io.transfer import Transfer, read_ranges
from layerzero.checkpoint.format.inventory import MODEL, Entry
from layerzero.checkpoint.format.safetensors_file import TensorEntry
from layerzero.state_dict.ranges import Extent

MIB = 1 << 20
SIZES = [0, 1, PAGE_NBYTES, 300_000, MIB, MIB + 1, 2 * MIB - 5]


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


def _read(path: Path, nbytes: int, offset: int = 0, needed: int | None = None) -> memoryview:
    """What a reader puts into page-aligned memory."""
    view = bytes_of(pages(nbytes or 1))[:nbytes]
    reader = FileReader(path)
    try:
        reader.read(view, offset, nbytes if needed is None else needed)
    finally:
        reader.close()
    return view


def _write(path: Path, data: bytes, offset: int = 0) -> None:
    """Write from memory that is aligned as the file is."""
    shift = offset % PAGE_NBYTES
    memory = bytes_of(pages(shift + len(data) or 1))[shift : shift + len(data)]
    memory[:] = data
    writer = FileWriter(path)
    try:
        writer.write(memory, offset)
        writer.finish()
    finally:
        writer.close()


def _watch(monkeypatch: pytest.MonkeyPatch, name: str) -> list[tuple[bool, int, int]]:
    """Calls of `preadv` or `pwritev` that move bytes: (is direct, offset, bytes asked for)."""
    seen: list[tuple[bool, int, int]] = []
    real_open, real = os.open, getattr(os, name)
    past_the_cache: set[int] = set()

    def opened(path: Any, flags: int, *args: Any) -> int:
        descriptor = real_open(path, flags, *args)
        past_the_cache.discard(descriptor)
        if flags & os.O_DIRECT:
            past_the_cache.add(descriptor)
        return descriptor

    def move(descriptor: int, views: Any, offset: int, *flags: int) -> int:
        if not flags:  # Others ask about the cache.
            seen.append((descriptor in past_the_cache, offset, sum(map(len, views))))
        return int(real(descriptor, views, offset, *flags))

    monkeypatch.setattr(direct.os, "open", opened)
    monkeypatch.setattr(direct.os, name, move)
    return seen


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
    _nothing_is_cached(monkeypatch)
    generator = random.Random(nbytes)
    written, read = _watch(monkeypatch, "pwritev"), _watch(monkeypatch, "preadv")
    path = tmp_path / "file"
    for offset in (0, PAGE_NBYTES, 64, 5003):
        content = bytearray(_file_of(path, offset + nbytes + 7000, generator))
        data = generator.randbytes(nbytes)
        content[offset : offset + nbytes] = data
        _write(path, data, offset)
        assert path.read_bytes() == content, "beside what was written, nothing changed"
        for begin, end in [(offset, offset + nbytes), (0, len(content))]:
            # As a region is read: whole pages, also of what is around, up to the end of the file.
            begin -= begin % PAGE_NBYTES
            num_pages = -(-(end - begin) // PAGE_NBYTES)
            found = _read(path, num_pages * PAGE_NBYTES, begin, end - begin)
            assert found[: end - begin] == content[begin:end]
        assert _read(path, nbytes, offset) == data
    if _can_go_direct(tmp_path) and nbytes >= MIB:
        assert any(is_direct for is_direct, *_ in written)
        assert any(is_direct for is_direct, *_ in read)


def test_ends_inside_a_page_are_written_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not _can_go_direct(tmp_path):
        pytest.skip("this file system writes through the cache alone")
    content = bytearray(_file_of(tmp_path / "file", 3 * MIB, random.Random(0)))
    seen = _watch(monkeypatch, "pwritev")
    data = memoryview(bytearray(content[::-1]))
    writer = FileWriter(tmp_path / "file")
    for begin in (100, MIB, 2 * MIB - 60):
        shift = begin % PAGE_NBYTES
        memory = bytes_of(pages(shift + MIB))[shift : shift + MIB - 100]
        memory[:] = content[begin : begin + MIB - 100] = data[begin : begin + MIB - 100]
        writer.write(memory, begin)
    assert all(is_direct and size % PAGE_NBYTES == 0 for is_direct, _, size in seen)
    assert len(seen) == 3
    writer.finish()
    sizes = [size for _, _, size in seen[3:]]
    assert sizes == [PAGE_NBYTES - 100, PAGE_NBYTES - 100, 60, PAGE_NBYTES - 160]
    assert (tmp_path / "file").read_bytes() == content


def test_what_the_cache_holds_is_read_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = _file_of(tmp_path / "file", MIB, random.Random(0))
    assert (tmp_path / "file").read_bytes() == content  # and now it is in the cache
    seen = _watch(monkeypatch, "preadv")
    assert _read(tmp_path / "file", MIB) == content
    assert not any(is_direct for is_direct, *_ in seen)


def test_a_cached_header_alone_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever reads a file's header leaves the pages behind it in the cache."""
    if not _can_go_direct(tmp_path):
        pytest.skip("this file system reads through the cache alone")
    monkeypatch.setattr(FileReader, "_is_cached", lambda reader, offset: offset < MIB // 8)
    content = _file_of(tmp_path / "file", MIB, random.Random(0))
    seen = _watch(monkeypatch, "preadv")
    assert _read(tmp_path / "file", MIB) == content
    assert all(is_direct for is_direct, *_ in seen)


@pytest.mark.parametrize("error", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_that_refuses_gets_ordinary_reads_and_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    _nothing_is_cached(monkeypatch)
    content = _file_of(tmp_path / "file", MIB, random.Random(0))
    refused = _refuse(monkeypatch, error)
    _write(tmp_path / "file", content[::-1])
    assert (tmp_path / "file").read_bytes() == content[::-1]
    _forget(tmp_path / "file")
    assert _read(tmp_path / "file", MIB) == content[::-1]
    if _can_go_direct(tmp_path):
        assert refused == ["pwritev", "preadv"]


def test_a_full_or_broken_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not _can_go_direct(tmp_path):
        pytest.skip("this file system reads and writes through the cache alone")
    _nothing_is_cached(monkeypatch)
    _file_of(tmp_path / "file", MIB, random.Random(0))
    _refuse(monkeypatch, errno.ENOSPC)
    with pytest.raises(OSError, match="No space left"):
        _write(tmp_path / "file", bytes(MIB))
    _refuse(monkeypatch, errno.EIO)
    with pytest.raises(OSError, match="Input/output"):
        _read(tmp_path / "file", MIB)


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
    for nbytes in (2 * MIB, MIB + 5000):
        with pytest.raises(OSError, match=f"now ends at byte {MIB}: it was truncated"):
            _read(tmp_path / "file", nbytes, needed=MIB + 5000)


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


def test_memory_lies_as_the_file_does(tmp_path: Path) -> None:
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
    transfers[3] = transfers[3]._replace(life="another")
    contents = {name: _file_of(tmp_path / name, 20 * MIB, random.Random(0)) for name in "abc"}
    found, _ = read_ranges(tmp_path, transfers, lambda nbytes: None)
    placed = [each.entry.tensor for each in found]
    for transfer, tensor in zip(transfers, placed, strict=True):
        assert tensor.dtype == torch.float32 and tensor.shape == transfer.entry.tensor.shape
        begin = transfer.place.begin + 4 * transfer.entry.start
        assert bytes_of(tensor) == contents[transfer.file][begin : begin + tensor.nbytes]
    places = [*begins[:4], begins[4] + 4 * 5, 96]
    for tensor, place in zip(placed, places, strict=False):
        assert (tensor.data_ptr() - place) % PAGE_NBYTES == 0
        nbytes = tensor.untyped_storage().nbytes()
        assert nbytes % PAGE_NBYTES == 0, "also the last page is all there"
    storages = [tensor.untyped_storage().data_ptr() for tensor in placed]
    assert storages[0] == storages[1] == storages[2]
    assert len({storages[index] for index in (0, 3, 4, 5, 6, 7)}) == 6
