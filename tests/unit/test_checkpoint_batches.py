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

from layerzero.checkpoint.file_io import batches as cutting
from layerzero.checkpoint.file_io import transfer as moving
from layerzero.checkpoint.file_io.aligned_memory import in_memory
from layerzero.checkpoint.file_io.batches import BATCH_NBYTES, Slice, Transfer, batches_of
from layerzero.checkpoint.file_io.direct_io import PAGE_NBYTES
from layerzero.checkpoint.file_io.transfer import read_ranges, write_ranges
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
        transfers.append(_transfer(begin, torch.empty(size, dtype=torch.uint8)))
        begin += size
    return transfers


def _check(batches: Sequence[Sequence[Slice]], transfers: Sequence[Transfer]) -> None:
    """Every byte of every shard is in one slice, and a batch is adjacent in the file."""
    found: dict[int, list[tuple[int, int]]] = {}
    for batch in batches:
        for each, following in itertools.pairwise(batch):
            assert each.end == following.offset
        for each in batch:
            place = transfers[each.transfer].place
            assert each.behind == place.begin + place.nbytes - each.end
            found.setdefault(each.transfer, []).append((each.offset, each.end))
    for index, transfer in enumerate(transfers):
        begin = transfer.place.begin
        assert found[index][0][0] == begin and found[index][-1][1] == begin + transfer.place.nbytes
        assert all(a[1] == b[0] for a, b in zip(found[index], found[index][1:], strict=False))


@pytest.mark.parametrize("seed", range(20))
def test_batches_have_every_byte_once_and_are_cut_at_pages(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cutting, "BATCH_NBYTES", 4 * PAGE_NBYTES)
    generator = random.Random(seed)
    sizes = [generator.choice([1, 40, PAGE_NBYTES, 9999, 40_000]) for _ in range(30)]
    begin = generator.choice([0, 64, PAGE_NBYTES, 5003])
    transfers = _adjacent(begin, sizes)
    order = generator.sample(range(len(sizes)), len(sizes))
    batches = batches_of(transfers, order)
    _check(batches, transfers)
    assert all(batch[-1].end % PAGE_NBYTES == 0 for batch in batches[:-1])
    nbytes = [batch[-1].end - batch[0].offset // PAGE_NBYTES * PAGE_NBYTES for batch in batches]
    assert max(nbytes) <= 4 * PAGE_NBYTES
    # As few as the largest size allows, and as equal as whole pages allow.
    assert len(batches) == -(-(begin % PAGE_NBYTES + sum(sizes)) // (4 * PAGE_NBYTES))
    assert max(nbytes) - min(nbytes) < PAGE_NBYTES * len(batches)


def test_a_run_just_over_the_largest_batch_is_halved() -> None:
    transfers = _adjacent(96, [BATCH_NBYTES + 96])
    first, second = batches_of(transfers, [0])
    assert abs(len(first[0].data) - len(second[0].data)) <= 2 * PAGE_NBYTES


def test_what_is_apart_in_the_file_and_too_many_slices_get_batches_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cutting, "_MAX_SLICES", 3)
    transfers = _adjacent(0, [10] * 7) + _adjacent(71, [10])
    batches = batches_of(transfers, range(8))
    _check(batches, transfers)
    assert [len(batch) for batch in batches] == [3, 3, 1, 1]


def test_spare_memory_of_a_cut_shard_is_the_rest_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "BATCH_NBYTES", 2 * PAGE_NBYTES)
    (transfer,) = _adjacent(100, [5 * PAGE_NBYTES])
    for spare in [(100, 3996), (0, 0)]:
        batches = batches_of([transfer._replace(spare=spare)], [0])
        for (each,) in batches:
            inside = each.offset - 100, 5 * PAGE_NBYTES + 100 - each.end
            expected = spare[0] + inside[0], spare[1] + inside[1]
            # Without spare memory nothing is known about what lies beside the shard.
            assert each.spare == (expected if any(spare) else (0, 0))


def _written(folder: Path, num_files: int) -> list[Transfer]:
    """Shards of several files, which exist at full length."""
    transfers = []
    for number in range(num_files):
        torch.manual_seed(number)
        data = torch.randint(0, 256, (300_000,), dtype=torch.uint8)
        transfers.append(_transfer(64, data, file=str(number)))
        (folder / str(number)).write_bytes(bytes(64 + len(data)))
    return transfers


def _as_new(transfers: Sequence[Transfer]) -> list[Transfer]:
    meta = [
        each._replace(entry=replace(each.entry, tensor=each.entry.tensor.to("meta")))
        for each in transfers
    ]
    return in_memory(meta, ["x"] * len(meta))


def test_several_files_are_moved_with_the_same_checksums(tmp_path: Path) -> None:
    transfers = _written(tmp_path, 5)
    done: list[int] = []
    written = write_ranges(tmp_path, transfers, done.append)
    new = _as_new(transfers)
    assert read_ranges(tmp_path, new, done.append) == written
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
    original = moving.FileWriter.write

    def write(writer: Any, views: Any, offset: int) -> Any:
        if threading.current_thread().name.endswith("_0"):
            assert began.wait(60), "the second file never began"
        else:
            began.set()
        return original(writer, views, offset)

    monkeypatch.setattr(moving.FileWriter, "write", write)
    write_ranges(tmp_path, transfers, lambda nbytes: None)


def test_an_error_names_its_file_and_closes_all(tmp_path: Path) -> None:
    transfers = _written(tmp_path, 4)
    write_ranges(tmp_path, transfers, lambda nbytes: None)
    open_files = len(list(Path("/proc/self/fd").iterdir()))
    (tmp_path / "2").write_bytes(bytes(1000))
    with pytest.raises(OSError, match=r"2: the file now ends at byte 1000: it was truncated"):
        read_ranges(tmp_path, _as_new(transfers), lambda nbytes: None)
    (tmp_path / "3").unlink()
    with pytest.raises(OSError, match=r"3: .*No such file"):
        write_ranges(tmp_path, transfers, lambda nbytes: None)
    assert len(list(Path("/proc/self/fd").iterdir())) == open_files
