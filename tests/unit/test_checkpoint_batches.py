"""Shards of a file in batches: all bytes once, cut at pages, about equally large."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from layerzero.checkpoint.file_io import transfer as moving
from layerzero.checkpoint.file_io.direct_io import PAGE_NBYTES, FileWriter
from layerzero.checkpoint.file_io.transfer import (
    BATCH_NBYTES,
    Tally,
    Transfer,
    read_ranges,
    write_ranges,
)
from layerzero.checkpoint.format.inventory import MODEL, Entry
from layerzero.checkpoint.format.safetensors_file import TensorEntry
from layerzero.state_dict.ranges import Extent
from tests.harness.checks import assert_bitwise


def _transfer(
    begin: int, data: torch.Tensor, shape: Sequence[int] = (), start: int = 0, file: str = "a"
) -> Transfer:
    """A shard of a tensor at byte `begin` of a file; `shape`: that of the tensor, if it is more."""
    whole = tuple(shape) or (data.numel(),)
    entry = Entry(
        kind=MODEL,
        name="w",
        aliases=(),
        extent=Extent.whole(whole),
        start=start,
        stop=start + data.numel(),
        tensor=data,
        order=(0, 0),
        is_whole=False,
        announces=False,
        replica=0,
    )
    return Transfer(file, TensorEntry(data.dtype, whole, begin), 0, entry)


def _adjacent(begin: int, sizes: Sequence[int]) -> list[Transfer]:
    transfers = []
    for size in sizes:
        data = torch.randint(0, 256, (size,), dtype=torch.uint8)
        transfers.append(_transfer(begin, data))
        begin += size
    return transfers


def _writes(
    folder: Path, transfers: Sequence[Transfer], monkeypatch: pytest.MonkeyPatch
) -> list[tuple[int, int]]:
    """Write the transfers of one file, and check its bytes; [begin, end) of each write, sorted."""
    end = max(each.place.end for each in transfers)
    content = bytearray(random.Random(0).randbytes(end + 100))
    (folder / "a").write_bytes(content)
    found: list[tuple[int, int]] = []
    original = FileWriter.write

    def write(writer: FileWriter, view: memoryview, offset: int) -> None:
        found.append((offset, offset + len(view)))
        original(writer, view, offset)

    with monkeypatch.context() as patched:
        patched.setattr(FileWriter, "write", write)
        write_ranges(folder, transfers, lambda nbytes: None)
    for each in transfers:
        content[each.place.begin : each.place.end] = bytes(each.entry.tensor.numpy())
    assert (folder / "a").read_bytes() == content
    return sorted(found)


@pytest.mark.parametrize("seed", range(20))
def test_batches_have_every_byte_once_and_are_cut_at_pages(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moving, "BATCH_NBYTES", 4 * PAGE_NBYTES)
    generator = random.Random(seed)
    sizes = [generator.choice([1, 40, PAGE_NBYTES, 9999, 40_000]) for _ in range(30)]
    begin = generator.choice([0, 64, PAGE_NBYTES, 5003])
    transfers = _adjacent(begin, sizes)
    batches = _writes(tmp_path, generator.sample(transfers, len(sizes)), monkeypatch)
    assert batches[0][0] == begin and batches[-1][1] == begin + sum(sizes)
    assert all(a[1] == b[0] for a, b in itertools.pairwise(batches))
    assert all(end % PAGE_NBYTES == 0 for _, end in batches[:-1])
    nbytes = [end - start // PAGE_NBYTES * PAGE_NBYTES for start, end in batches]
    assert max(nbytes) <= 4 * PAGE_NBYTES
    # As few as the largest size allows, and as equal as whole pages allow.
    assert len(batches) == -(-(begin % PAGE_NBYTES + sum(sizes)) // (4 * PAGE_NBYTES))
    assert max(nbytes) - min(nbytes) < PAGE_NBYTES * len(batches)


def test_a_run_just_over_the_largest_batch_is_halved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = _writes(tmp_path, _adjacent(96, [BATCH_NBYTES + 96]), monkeypatch)
    assert abs(first[1] - first[0] - (second[1] - second[0])) <= 2 * PAGE_NBYTES


def test_what_is_apart_in_the_file_gets_batches_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfers = _adjacent(0, [10] * 7) + _adjacent(71, [10])
    assert _writes(tmp_path, transfers, monkeypatch) == [(0, 70), (71, 81)]


def _written(folder: Path, num_files: int) -> list[Transfer]:
    """Shards of several files, which exist at full length."""
    transfers = []
    for number in range(num_files):
        torch.manual_seed(number)
        data = torch.randint(0, 256, (300_000,), dtype=torch.uint8)
        transfers.append(_transfer(64, data, file=str(number)))
        (folder / str(number)).write_bytes(bytes(64 + len(data)))
    return transfers


def _read(
    folder: Path, transfers: Sequence[Transfer], progress: Any
) -> tuple[list[Transfer], list[Tally]]:
    meta = [
        each._replace(entry=replace(each.entry, tensor=each.entry.tensor.to("meta")))
        for each in transfers
    ]
    return read_ranges(folder, meta, progress)


def test_several_files_are_moved_with_the_same_checksums(tmp_path: Path) -> None:
    transfers = _written(tmp_path, 5)
    done: list[int] = []
    written = write_ranges(tmp_path, transfers, done.append)
    new, read_again = _read(tmp_path, transfers, done.append)
    assert read_again == written
    for old, read in zip(transfers, new, strict=True):
        assert_bitwise(read.entry.tensor, old.entry.tensor)
        assert (tmp_path / old.file).read_bytes()[64:] == bytes(old.entry.tensor.numpy())
    assert sum(done) == 2 * 5 * 300_000


def test_the_next_file_begins_before_the_last_one_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the disk would wait at the end of each file."""
    transfers = _written(tmp_path, 2)
    began = threading.Event()
    original = FileWriter.write

    def write(writer: Any, view: Any, offset: int) -> Any:
        if threading.current_thread().name.endswith("_0"):
            assert began.wait(60), "the second file never began"
        else:
            began.set()
        return original(writer, view, offset)

    monkeypatch.setattr(FileWriter, "write", write)
    write_ranges(tmp_path, transfers, lambda nbytes: None)


def test_an_error_names_its_file_and_closes_all(tmp_path: Path) -> None:
    transfers = _written(tmp_path, 4)
    write_ranges(tmp_path, transfers, lambda nbytes: None)
    open_files = len(list(Path("/proc/self/fd").iterdir()))
    (tmp_path / "2").write_bytes(bytes(1000))
    with pytest.raises(OSError, match=r"2: the file now ends at byte 1000: it was truncated"):
        _read(tmp_path, transfers, lambda nbytes: None)
    (tmp_path / "3").unlink()
    with pytest.raises(OSError, match=r"3: .*No such file"):
        write_ranges(tmp_path, transfers, lambda nbytes: None)
    assert len(list(Path("/proc/self/fd").iterdir())) == open_files
