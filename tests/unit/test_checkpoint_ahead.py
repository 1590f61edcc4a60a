"""Blocks reserved before a save, and pages taken ahead of a load, where the system has them."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from layerzero.checkpoint.file_io import direct_io
from layerzero.checkpoint.file_io import transfer as moving
from layerzero.checkpoint.file_io.direct_io import PAGE_NBYTES, pages, populating
from layerzero.checkpoint.file_io.transfer import Transfer, read_ranges, write_ranges
from layerzero.checkpoint.format import folder
from layerzero.checkpoint.format.folder import write_durably
from layerzero.checkpoint.format.inventory import MODEL, Entry
from layerzero.checkpoint.format.safetensors_file import TensorEntry
from layerzero.state_dict.ranges import Extent

MIB = 1 << 20
HEAD = b"head of the file"
needs_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux")


def _fails_with(error: int) -> Callable[..., int]:
    def call(*arguments: Any) -> int:
        ctypes.set_errno(error)
        return -1

    return call


@needs_linux
def test_a_new_file_has_all_its_blocks(tmp_path: Path) -> None:
    with (tmp_path / "probe").open("wb") as probe:
        call = folder._fallocate()
        if call(probe.fileno(), 0, ctypes.c_int64(0), ctypes.c_int64(MIB)):
            pytest.skip("this file system reserves no blocks")
    write_durably(tmp_path / "file", HEAD, MIB)
    assert (tmp_path / "file").read_bytes() == HEAD + bytes(MIB - len(HEAD))
    assert (tmp_path / "file").stat().st_blocks * 512 >= MIB


@pytest.mark.parametrize(
    "call",
    [None, _fails_with(errno.EOPNOTSUPP), _fails_with(errno.ENOSYS), _fails_with(errno.EINTR)],
    ids=["no such call", "refused by the file system", "refused by the kernel", "interrupted"],
)
def test_without_reserved_blocks_a_new_file_has_its_length(
    call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "_fallocate", lambda: call)
    write_durably(tmp_path / "file", HEAD, MIB)
    assert (tmp_path / "file").read_bytes() == HEAD + bytes(MIB - len(HEAD))


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_shows_before_anything_is_written(
    error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "_fallocate", lambda: _fails_with(error))
    with pytest.raises(OSError) as caught:
        write_durably(tmp_path / "file", HEAD, MIB)
    assert caught.value.errno == error


def test_other_systems_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert folder._fallocate() is None
    assert direct_io._madvise() is None


def _transfer(begin: int, nbytes: int, file: str = "a") -> Transfer:
    entry = Entry(
        kind=MODEL,
        name="w",
        aliases=(),
        extent=Extent.whole((nbytes,)),
        start=0,
        stop=nbytes,
        tensor=torch.empty(nbytes, dtype=torch.uint8, device="meta"),
        order=(0, 0),
        is_whole=False,
        announces=False,
        replica=0,
    )
    return Transfer(file, TensorEntry(torch.uint8, (nbytes,), begin), 0, entry)


def _present(tensor: torch.Tensor) -> float:
    """Which part of a tensor's whole pages the kernel has given."""
    begin = -(-tensor.data_ptr() // PAGE_NBYTES) * PAGE_NBYTES
    count = (tensor.data_ptr() + tensor.nbytes - begin) // PAGE_NBYTES
    found = (ctypes.c_ubyte * count)()
    library = ctypes.CDLL(None, use_errno=True)
    where = ctypes.c_void_p(begin), ctypes.c_size_t(count * PAGE_NBYTES)
    assert library.mincore(*where, found) == 0
    return sum(each & 1 for each in found) / count


def _finish() -> None:
    """Wait until the thread has populated all, which a load does not."""
    for thread in threading.enumerate():
        if thread.name == "layerzero-populate":
            thread.join()


@needs_linux
def test_memory_is_there_ahead_of_the_reads() -> None:
    with mmap.mmap(-1, PAGE_NBYTES) as probe:
        try:
            probe.madvise(direct_io._POPULATE_WRITE)
        except OSError:
            pytest.skip("needs Linux 5.14")
    memories = [pages(6 * MIB), pages(6 * MIB)]
    assert [_present(each) for each in memories] == [0, 0]
    with populating(memories, 0):
        _finish()
    assert [_present(each) for each in memories] == [1, 1]
    assert not any(each.any() for each in memories)


def test_memory_is_asked_for_in_the_order_of_reading_without_what_is_read_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(direct_io, "_madvise", lambda: lambda *step: asked.append(step[:2]))
    step = direct_io._POPULATE_NBYTES
    memories = [pages(step + 5 * PAGE_NBYTES), pages(PAGE_NBYTES), pages(2 * step)]
    first, second, third = (each.data_ptr() for each in memories)
    steps = [
        (first, step),
        (first + step, 5 * PAGE_NBYTES),
        (second, PAGE_NBYTES),
        (third, step),
        (third + step, step),
    ]
    for lead in range(5):
        asked.clear()
        with populating(memories, lead * step + 5):
            _finish()
        assert asked == steps[lead:]


def test_pages_come_in_the_order_of_the_files_and_small_shards_take_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: list[int] = []

    @contextlib.contextmanager
    def records(memories: list[torch.Tensor], lead_nbytes: int) -> Iterator[None]:
        recorded.extend(each.data_ptr() for each in memories)
        yield

    monkeypatch.setattr(moving, "populating", records)
    # Parameters by themselves, as a model lists them; in the file their states lie apart.
    listed = [_transfer(0, MIB), _transfer(3 * MIB, MIB), _transfer(MIB, MIB)]
    listed += [_transfer(0, MIB, file="b"), _transfer(4 * MIB + 100, 100_000)]
    for name in "ab":
        (tmp_path / name).write_bytes(bytes(5 * MIB))
    found, _ = read_ranges(tmp_path, listed, lambda nbytes: None)
    first, far, second, other, _ = (each.entry.tensor.data_ptr() for each in found)
    assert second == first + MIB
    assert recorded == [first, far, other]


@pytest.mark.parametrize("result", [None, -1, 0], ids=["no such call", "refused", "done"])
def test_values_are_read_whatever_the_kernel_says(
    result: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, int, int]] = []

    def madvise(address: int, nbytes: int, advice: int) -> int:
        calls.append((address, nbytes, advice))
        assert result is not None
        return result

    monkeypatch.setattr(direct_io, "_madvise", lambda: None if result is None else madvise)
    data = torch.randint(0, 256, (40 * MIB,), dtype=torch.uint8)
    listed = _transfer(64, len(data))
    full = listed._replace(entry=replace(listed.entry, tensor=data))
    write_durably(tmp_path / "a", HEAD, 64 + len(data))
    written = write_ranges(tmp_path, [full], lambda nbytes: None)
    (found,), read = read_ranges(tmp_path, [listed], lambda nbytes: None)
    assert read == written and torch.equal(found.entry.tensor, data)
    # A refusal is not repeated; and reads do not wait for what they have overtaken.
    assert len(calls) <= {None: 0, -1: 1, 0: 3}[result]


def test_an_error_of_a_read_ends_the_thread(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        read_ranges(tmp_path, [_transfer(0, 64 * MIB)], lambda nbytes: None)
    assert all(thread.name != "layerzero-populate" for thread in threading.enumerate())
