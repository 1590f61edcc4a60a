"""Bytes between shards and files: past the cache, in batches cut at pages, whatever is refused."""

import ctypes
import errno
import itertools
import math
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from layerzero.checkpoint import transfer as moving
from layerzero.checkpoint.format import folder
from layerzero.checkpoint.format.folder import write_durably
from layerzero.checkpoint.format.inventory import MODEL, Entry
from layerzero.checkpoint.format.safetensors_file import TensorEntry
from layerzero.checkpoint.transfer import (
    PAGE_NBYTES,
    FileReader,
    FileWriter,
    ReadRanges,
    Tally,
    Transfer,
    WriteRanges,
    bytes_of,
    pages,
)
from layerzero.state_dict.ranges import Extent
from tests.harness.checks import assert_bitwise
from tests.harness.recording import observed

MIB = 1 << 20
SIZES = [0, 1, PAGE_NBYTES, 300_000, MIB, MIB + 1, 2 * MIB - 5]
HEAD = b"head of the file"


def _transfer(
    begin: int, data: torch.Tensor, shape: Sequence[int] = (), start: int = 0, file: str = "a"
) -> Transfer:
    """A shard of a tensor at byte `begin` of a file; `shape`: that of the tensor, if it is more."""
    whole = tuple(shape) or (data.numel(),)
    entry = Entry(
        *(MODEL, "w", (), Extent.whole(whole), start, start + data.numel(), data),
        order=(0, 0),
        is_whole=False,
        announces=False,
        replica=0,
    )
    return Transfer(TensorEntry(data.dtype, whole, begin, file), 0, entry)


def _drawn(nbytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8)


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


def _cache_holds(monkeypatch: pytest.MonkeyPatch, until: int) -> None:
    """Systems forget a file when they like: beside other work perhaps not at once."""
    monkeypatch.setattr(FileReader, "_is_cached", lambda reader, offset: offset < until)


def _read(path: Path, nbytes: int, offset: int = 0, needed: int | None = None) -> memoryview:
    view = bytes_of(pages(nbytes or 1))[:nbytes]
    reader = FileReader(path)
    try:
        reader.read(view, offset, nbytes if needed is None else needed)
    finally:
        reader.close()
    return view


def _aligned(data: bytes, offset: int) -> memoryview:
    """`data` in memory that is aligned as the file is at `offset`."""
    shift = offset % PAGE_NBYTES
    memory = bytes_of(pages(shift + len(data) or 1))[shift : shift + len(data)]
    memory[:] = data
    return memory


def _write(path: Path, data: bytes, offset: int = 0) -> None:
    writer = FileWriter(path)
    try:
        writer.write(_aligned(data, offset), offset)
        writer.finish()
    finally:
        writer.close()


class Call(NamedTuple):
    name: str
    is_direct: bool


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Call]]:
    real_open = os.open
    real = {name: getattr(os, name) for name in ("preadv", "pwritev")}

    def watching(refusal: int = 0) -> list[Call]:
        """Calls that move bytes; those past the cache fail with the error `refusal`, if not 0, and
        others move about half of what they should."""
        seen: list[Call] = []
        past_the_cache: set[int] = set()

        def opened(path: Any, flags: int, *args: Any) -> int:
            descriptor = real_open(path, flags, *args)
            past_the_cache.discard(descriptor)
            if flags & os.O_DIRECT:
                past_the_cache.add(descriptor)
            return descriptor

        def moves(name: str) -> Any:
            def move(descriptor: int, views: Any, offset: int, *flags: int) -> int:
                if not flags:  # Others ask about the cache.
                    is_direct = descriptor in past_the_cache
                    seen.append(Call(name, is_direct))
                    if is_direct and refusal:
                        raise OSError(refusal, os.strerror(refusal))
                    views = views if is_direct else [views[0][: len(views[0]) // 2 + 1]]
                return int(real[name](descriptor, views, offset, *flags))

            return move

        monkeypatch.setattr(moving.os, "open", opened)
        for name in real:
            monkeypatch.setattr(moving.os, name, moves(name))
        return seen

    return watching


@pytest.fixture
def direct_folder(tmp_path: Path) -> Path:
    """A folder on a file system with O_DIRECT."""
    (tmp_path / "probe").write_bytes(bytes(PAGE_NBYTES))
    try:
        os.close(os.open(tmp_path / "probe", os.O_RDONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("this file system reads and writes through the cache alone")
    return tmp_path


def test_what_is_written_is_what_is_read(
    direct_folder: Path, monkeypatch: pytest.MonkeyPatch, watch: Callable[..., list[Call]]
) -> None:
    _cache_holds(monkeypatch, 0)
    path = direct_folder / "file"
    for nbytes in SIZES:
        generator = random.Random(nbytes)
        seen = watch()
        for offset in (0, PAGE_NBYTES, 64, 5003):
            content = bytearray(_file_of(path, offset + nbytes + 7000, generator))
            data = generator.randbytes(nbytes)
            content[offset : offset + nbytes] = data
            _write(path, data, offset)
            assert path.read_bytes() == content, "beside what was written, nothing changed"
            for begin, end in [(offset, offset + nbytes), (0, len(content))]:
                # As a region is read: whole pages, also of what is around, up to the file's end.
                begin -= begin % PAGE_NBYTES
                num_pages = -(-(end - begin) // PAGE_NBYTES)
                found = _read(path, num_pages * PAGE_NBYTES, begin, end - begin)
                assert found[: end - begin] == content[begin:end]
            assert _read(path, nbytes, offset) == data
        if nbytes >= MIB:
            assert {call.name for call in seen if call.is_direct} == {"preadv", "pwritev"}


def test_what_the_cache_holds_is_read_from_there(
    direct_folder: Path, monkeypatch: pytest.MonkeyPatch, watch: Callable[..., list[Call]]
) -> None:
    path = direct_folder / "file"
    content = _file_of(path, MIB, random.Random(0))
    assert path.read_bytes() == content  # and now it is in the cache
    seen = watch()
    assert _read(path, MIB) == content
    assert not any(call.is_direct for call in seen)
    # Whoever reads a file's header leaves the pages behind it in the cache: that does not count.
    _cache_holds(monkeypatch, MIB // 8)
    seen.clear()
    assert _read(path, MIB) == content
    assert all(call.is_direct for call in seen)


def test_a_refusal_leads_to_ordinary_reads_and_writes_and_a_full_disk_to_an_error(
    direct_folder: Path, monkeypatch: pytest.MonkeyPatch, watch: Callable[..., list[Call]]
) -> None:
    _cache_holds(monkeypatch, 0)
    path = direct_folder / "file"
    content = _file_of(path, MIB, random.Random(0))
    for error in (errno.EINVAL, errno.EOPNOTSUPP):
        seen = watch(error)
        content = content[::-1]
        _write(path, content)
        _forget(path)
        assert _read(path, MIB) == content
        assert [call.name for call in seen if call.is_direct] == ["pwritev", "preadv"]
    watch(errno.ENOSPC)
    with pytest.raises(OSError, match="No space left"):
        _write(path, bytes(MIB))
    watch(errno.EIO)
    with pytest.raises(OSError, match="Input/output"):
        _read(path, MIB)


def _moved(kind: Any, root: Path, *transfers: Sequence[Transfer]) -> list[Tally]:
    with kind(root) as moved:
        for some in transfers:
            moved.start(some)
        tallies: list[Tally] = moved.finish()
    return tallies


def _read_again(root: Path, transfers: Sequence[Transfer]) -> tuple[list[Transfer], list[Tally]]:
    into = [
        each._replace(entry=replace(each.entry, tensor=torch.empty_like(each.entry.tensor)))
        for each in transfers
    ]
    return into, _moved(ReadRanges, root, into[:2], into[2:])


def test_shards_are_written_to_and_read_from_any_place_of_several_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most, half = MIB, MIB // 2
    monkeypatch.setattr(moving, "BATCH_NBYTES", most)
    batches: list[int] = []
    shapes = [(half,), (3, 7), (half,), (half,)]
    begins = list(itertools.accumulate((4 * math.prod(shape) for shape in shapes), initial=104))
    transfers = [
        _transfer(begin, torch.randn(math.prod(shape)), shape)
        for begin, shape in zip(begins[:-1], shapes, strict=True)
    ]
    transfers += [
        _transfer(begins[-1], torch.randn(half), (8 * half,), 5),  # not side by side
        _transfer(96, torch.randn(half), file="b"),  # another file
        _transfer(4 * MIB + 2, torch.randn(half), file="b"),  # no place for a float32
        _transfer(96, torch.randn(10), file="c"),  # little
        _transfer(200, torch.randn(0), (10,), 4, file="c"),  # nothing
        _transfer(20 * MIB - 40, torch.randn(10), file="c"),  # the last page of the file
    ]
    generator = random.Random(0)
    contents = {n: bytearray(_file_of(tmp_path / n, 20 * MIB, generator)) for n in "abc"}
    generator.shuffle(transfers)
    with observed(FileWriter, "write", lambda _, view, __: batches.append(len(view))):
        written = _moved(WriteRanges, tmp_path, transfers)
    assert max(batches) <= most and len(batches) > 6, "regions in several batches"
    for transfer in transfers:
        tensor, begin = transfer.entry.tensor, transfer.place.begin + 4 * transfer.entry.start
        contents[transfer.place.file][begin : begin + tensor.nbytes] = bytes_of(tensor)
    for name, content in contents.items():
        assert (tmp_path / name).read_bytes() == content
        _forget(tmp_path / name)
    new, tallies = _read_again(tmp_path, transfers)
    assert tallies == written
    for old, read in zip(transfers, new, strict=True):
        assert_bitwise(read.entry.tensor, old.entry.tensor)


def test_an_error_names_its_file_and_closes_all(tmp_path: Path) -> None:
    transfers = [_transfer(64, _drawn(300_000), file=name) for name in "abc"]
    open_files = len(list(Path("/proc/self/fd").iterdir()))
    for name in "abc":
        (tmp_path / name).write_bytes(bytes(1000 if name == "b" else 300_064))
    with pytest.raises(OSError, match=r"b: the file now ends at byte 1000: it was truncated"):
        _read_again(tmp_path, transfers)
    (tmp_path / "c").unlink()
    for kind in (ReadRanges, WriteRanges):
        with pytest.raises(OSError, match=r"c: .*No such file"):
            _moved(kind, tmp_path, transfers[2:])
    assert len(list(Path("/proc/self/fd").iterdir())) == open_files


def _fails_with(error: int) -> Callable[..., int]:
    def call(*arguments: Any) -> int:
        ctypes.set_errno(error)
        return -1

    return call


def test_a_new_file_has_its_length_with_and_without_reserved_blocks_and_a_full_disk_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for call in (folder._fallocate(), None, _fails_with(errno.EOPNOTSUPP)):
        monkeypatch.setattr(folder, "_fallocate", lambda call=call: call)
        write_durably(tmp_path / "file", HEAD, MIB)
        assert (tmp_path / "file").read_bytes() == HEAD + bytes(MIB - len(HEAD))
    monkeypatch.setattr(folder, "_fallocate", lambda: _fails_with(errno.ENOSPC))
    with pytest.raises(OSError, match="No space left"):
        write_durably(tmp_path / "file", HEAD, MIB)
