"""Moves bytes between this rank's shards and files, and computes the checksum of every shard.

A rank writes and reads its own runs in place; adjacent shards of a file go in one call. Nothing
here is collective.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from layerzero.checkpoint.file_io.direct_io import FileReader, FileWriter, bytes_of
from layerzero.checkpoint.format.crc import crc32, placed
from layerzero.checkpoint.format.inventory import Entry
from layerzero.checkpoint.format.safetensors_file import TensorEntry
from layerzero.core.device_streams import stream_interface
from layerzero.core.host import HostMemory

_WINDOW_NBYTES = 8 << 20
"""Files are moved in windows of this size, so that a window is still in the CPU cache when it is
moved after being checksummed, or the other way round."""
_NUM_THREADS = 4
_MAX_VIEWS = 512
"""Largest number of buffers in one call; systems allow 1024 (IOV_MAX)."""

File = TypeVar("File")
Progress = Callable[[int], None]
"""Called with the number of bytes after each batch is written or read."""


class Transfer(NamedTuple):
    """A shard and the tensor in a file that it is part of."""

    file: str
    place: TensorEntry
    number: int
    """Number of the tensor, the same on all ranks."""
    entry: Entry
    spare: tuple[int, int] = (0, 0)
    """Bytes in memory before and behind the shard that are laid out like the file, and that a read
    may fill."""


class Tally(NamedTuple):
    """Bytes that one rank moved of a tensor, and their CRC; Note [Checksums add up] in crc.py."""

    number: int
    replica: int
    nbytes: int
    crc: int


class _Slice(NamedTuple):
    offset: int
    data: memoryview | torch.Tensor
    """Bytes; of a shard on a device a tensor."""
    transfer: int
    behind: int
    """Bytes of the tensor behind this slice."""
    spare: tuple[int, int]
    """As in `Transfer`, relative to this slice."""


def write_ranges(folder: Path, transfers: Sequence[Transfer], progress: Progress) -> list[Tally]:
    """Write shards into existing files, and fsync them. Blocks.

    Shards on a device, whose values must be there, go through one window of host memory for each
    thread.

    Raises:
        OSError: a write failed.
    """
    windows = _Windows()

    def write(file: FileWriter, batch: list[_Slice]) -> list[int]:
        views = windows.fetch(batch)
        crcs = [crc32(view) for view in views]
        file.write(views, batch[0].offset)
        return crcs

    def open_file(path: Path) -> FileWriter:
        return FileWriter(path, _WINDOW_NBYTES)

    return _move(folder, transfers, open_file, write, progress)


def read_ranges(folder: Path, transfers: Sequence[Transfer], progress: Progress) -> list[Tally]:
    """Read shards (on the CPU). Blocks; fastest in memory laid out by aligned_memory.py.

    Raises:
        OSError: a read failed, or a file is too short.
    """

    def read(file: FileReader, batch: list[_Slice]) -> list[int]:
        spare = batch[0].spare[0], batch[-1].spare[1]
        views = [each.data for each in batch if isinstance(each.data, memoryview)]
        file.read(views, batch[0].offset, spare)
        return [crc32(view) for view in views]

    return _move(folder, transfers, FileReader, read, progress)


class _Windows:
    """Host memory through which threads write shards that are on a device."""

    def __init__(self) -> None:
        self._windows: dict[tuple[int, torch.device], torch.Tensor] = {}

    def fetch(self, batch: Sequence[_Slice]) -> list[memoryview]:
        """The bytes of adjacent slices, on the host; valid until the thread fetches again."""
        views: list[memoryview] = []
        devices = set()
        end = 0
        for each in batch:
            if isinstance(each.data, memoryview):
                views.append(each.data)
                continue
            part = self._window(each.data.device)[end : end + len(each.data)]
            part.copy_(each.data, non_blocking=True)
            views.append(bytes_of(part))
            devices.add(each.data.device)
            end += len(each.data)
        wait_for(devices)
        return views

    def _window(self, device: torch.device) -> torch.Tensor:
        key = threading.get_ident(), device
        if key not in self._windows:
            memory = HostMemory(pin_memory=True, device=device)
            self._windows[key] = memory.lasting(_WINDOW_NBYTES, torch.uint8)
        return self._windows[key]


def is_on_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def wait_for(devices: Iterable[torch.device]) -> None:
    """Block until the current stream of each is done."""
    for device in devices:
        stream_interface(device).current_stream(device).synchronize()


def _move(
    folder: Path,
    transfers: Sequence[Transfer],
    open_file: Callable[[Path], contextlib.AbstractContextManager[File]],
    move: Callable[[File, list[_Slice]], list[int]],
    progress: Progress,
) -> list[Tally]:
    """Move all shards, file by file, in several threads; `move` returns the CRC of each slice."""
    by_file: dict[str, list[int]] = {}
    for index, transfer in enumerate(transfers):
        by_file.setdefault(transfer.file, []).append(index)
    crcs: list[int] = []
    done: list[_Slice] = []
    # Threads let the disk work on the next batches while one is copied and checksummed.
    with ThreadPoolExecutor(_NUM_THREADS, "layerzero-transfer") as pool:
        for name, indices in by_file.items():
            slices = sorted(
                (each for index in indices for each in _slices(transfers[index], index)),
                key=lambda each: each.offset,
            )
            try:
                with open_file(folder / name) as file:
                    under_way: list[Future[list[int]]] = []
                    try:
                        batches = list(_batches(slices))
                        under_way += [pool.submit(move, file, batch) for batch in batches]
                        for batch, future in zip(batches, under_way, strict=True):
                            crcs.extend(future.result())
                            progress(sum(len(each.data) for each in batch))
                    finally:
                        for future in under_way:
                            future.cancel()
                        wait(under_way)  # Leaving the context closes the file, also on an error.
            except OSError as error:
                raise OSError(f"{folder / name}: {error}") from error
            done.extend(slices)
    return _tallies(transfers, done, crcs)


def _end(each: _Slice) -> int:
    return each.offset + len(each.data)


def _slices(transfer: Transfer, index: int) -> Iterable[_Slice]:
    entry, place = transfer.entry, transfer.place
    tensor = entry.tensor
    data = bytes_of(tensor) if is_on_host(tensor) else tensor.view(torch.uint8)
    width = place.dtype.itemsize
    for run in entry.runs():
        begin, end = run.local * width, (run.local + run.numel) * width
        offset = run.start * width
        start = begin
        while start < end:
            at = offset + start - begin
            stop = min(end, start + _WINDOW_NBYTES - (place.begin + at) % _WINDOW_NBYTES)
            behind = place.nbytes - at - (stop - start)
            spare = transfer.spare
            if any(spare):
                spare = spare[0] + start, spare[1] + len(data) - stop
            yield _Slice(place.begin + at, data[start:stop], index, behind, spare)
            start = stop


def _batches(slices: Sequence[_Slice]) -> Iterable[list[_Slice]]:
    """Group slices that are adjacent in one window of the file."""
    batch: list[_Slice] = []
    end = 0
    for each in slices:
        full = each.offset % _WINDOW_NBYTES == 0 or len(batch) == _MAX_VIEWS
        if batch and (full or each.offset != end):
            yield batch
            batch = []
        batch.append(each)
        end = _end(each)
    if batch:
        yield batch


def _tallies(
    transfers: Sequence[Transfer], done: Sequence[_Slice], crcs: Sequence[int]
) -> list[Tally]:
    parts = placed(crcs, [each.behind for each in done])
    crc_of: NDArray[np.uint32] = np.zeros(len(transfers), dtype=np.uint32)
    nbytes_of: NDArray[np.int64] = np.zeros(len(transfers), dtype=np.int64)
    owners = np.array([each.transfer for each in done], dtype=np.int64)
    np.bitwise_xor.at(crc_of, owners, parts)
    np.add.at(nbytes_of, owners, [len(each.data) for each in done])
    return [
        Tally(transfer.number, transfer.entry.replica, int(nbytes), int(crc))
        for transfer, nbytes, crc in zip(transfers, nbytes_of, crc_of, strict=True)
    ]


def pack_tallies(tallies: Sequence[Tally]) -> bytes:
    return np.array(tallies, dtype=np.int64).tobytes()


def sum_tallies(packed: Sequence[bytes]) -> dict[tuple[int, int], tuple[int, int]]:
    """(bytes, CRC) of each (tensor, replica), combined from the tallies of all ranks."""
    found: dict[tuple[int, int], tuple[int, int]] = {}
    for each in packed:
        for number, replica, nbytes, crc in np.frombuffer(each, dtype=np.int64).reshape(-1, 4):
            key = int(number), int(replica)
            old = found.get(key, (0, 0))
            found[key] = old[0] + int(nbytes), old[1] ^ int(crc)
    return found
