"""Moves bytes between this rank's shards and files, and computes the checksum of every shard.

A rank writes and reads its own runs in place; adjacent shards of a file go in one call. Nothing
here is collective.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from layerzero.checkpoint.file_io.batches import BATCH_NBYTES, Slice, Transfer, batches_of
from layerzero.checkpoint.file_io.direct_io import FileReader, FileWriter, bytes_of
from layerzero.checkpoint.file_io.population import populating
from layerzero.checkpoint.format.crc import crc32, placed
from layerzero.flat.device_streams import stream_interface
from layerzero.flat.host_memory import HostMemory

_NUM_THREADS = 4
File = TypeVar("File")
Progress = Callable[[int], None]
"""Called with the number of bytes after each batch is written or read."""


class Tally(NamedTuple):
    """Bytes that one rank moved of a tensor, and their CRC; Note [Checksums add up] in crc.py."""

    number: int
    replica: int
    nbytes: int
    crc: int


def write_ranges(folder: Path, transfers: Sequence[Transfer], progress: Progress) -> list[Tally]:
    """Write shards into existing files, and fsync them. Blocks.

    Shards on a device, whose values must be there, go through one window of host memory for each
    thread.

    Raises:
        OSError: a write failed.
    """
    windows = _Windows()

    def write(file: FileWriter, batch: list[Slice]) -> list[int]:
        return file.write(windows.fetch(batch), batch[0].offset)

    def open_file(path: Path) -> FileWriter:
        return FileWriter(path, BATCH_NBYTES)

    return _move(folder, transfers, open_file, write, progress)


def read_ranges(folder: Path, transfers: Sequence[Transfer], progress: Progress) -> list[Tally]:
    """Read shards (on the CPU). Blocks; fastest in memory laid out by aligned_memory.py.

    Raises:
        OSError: a read failed, or a file is too short.
    """

    def read(file: FileReader, batch: list[Slice]) -> list[int]:
        spare = batch[0].spare[0], batch[-1].spare[1]
        views = [each.data for each in batch if isinstance(each.data, memoryview)]
        file.read(views, batch[0].offset, spare)
        return [crc32(view) for view in views]

    with populating(transfers, _NUM_THREADS * BATCH_NBYTES):
        return _move(folder, transfers, FileReader, read, progress)


class _Windows:
    """Host memory through which threads write shards that are on a device."""

    def __init__(self) -> None:
        self._windows: dict[tuple[int, torch.device], torch.Tensor] = {}

    def fetch(self, batch: Sequence[Slice]) -> list[memoryview]:
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
            self._windows[key] = memory.lasting(BATCH_NBYTES, torch.uint8)
        return self._windows[key]


def wait_for(devices: Iterable[torch.device]) -> None:
    """Block until the current stream of each is done."""
    for device in devices:
        stream_interface(device).current_stream(device).synchronize()


def _move(
    folder: Path,
    transfers: Sequence[Transfer],
    open_file: Callable[[Path], contextlib.AbstractContextManager[File]],
    move: Callable[[File, list[Slice]], list[int]],
    progress: Progress,
) -> list[Tally]:
    """Move all shards, file by file, in several threads; `move` returns the CRC of each slice."""
    by_file: dict[str, list[int]] = {}
    for index, transfer in enumerate(transfers):
        by_file.setdefault(transfer.file, []).append(index)
    crcs: list[int] = []
    done: list[Slice] = []
    under_way: deque[_FileMove[File]] = deque()
    # Threads let the disk work on the next batches while one is copied and checksummed.
    with ThreadPoolExecutor(_NUM_THREADS, "layerzero-transfer") as pool:

        def finish_first() -> None:
            file = under_way[0]
            crcs.extend(file.finish(progress))
            done.extend(each for batch in file.batches for each in batch)
            under_way.popleft()

        try:
            for name, indices in by_file.items():
                batches = batches_of(transfers, indices)
                under_way.append(_FileMove(folder / name, open_file, batches, move, pool))
                # The batches of the next file wait in the pool, so that the disk does not fall
                # idle at the end of a file.
                if len(under_way) > 1:
                    finish_first()
            while under_way:
                finish_first()
        finally:
            for file in under_way:
                file.abandon()
    return _tallies(transfers, done, crcs)


class _FileMove(Generic[File]):
    """The batches of one file that a pool of threads moves."""

    def __init__(
        self,
        path: Path,
        open_file: Callable[[Path], contextlib.AbstractContextManager[File]],
        batches: Sequence[list[Slice]],
        move: Callable[[File, list[Slice]], list[int]],
        pool: ThreadPoolExecutor,
    ) -> None:
        self.batches = batches
        self._path = path
        self._open = contextlib.ExitStack()
        with _naming(path):
            file = self._open.enter_context(open_file(path))
        self._futures = [pool.submit(move, file, batch) for batch in batches]

    def finish(self, progress: Progress) -> list[int]:
        """Wait for all batches and close the file; the CRC of each slice, in order.

        Raises:
            OSError: a batch was not moved, or the file not closed; then `abandon` it.
        """
        crcs: list[int] = []
        with _naming(self._path):
            for batch, future in zip(self.batches, self._futures, strict=True):
                crcs.extend(future.result())
                progress(sum(len(each.data) for each in batch))
            self._open.close()
        return crcs

    def abandon(self) -> None:
        """Wait for the batches that have begun, drop the others, and close the file."""
        for future in self._futures:
            future.cancel()
        wait(self._futures)
        self._open.__exit__(*sys.exc_info())


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OSError(f"{path}: {error}") from error


def _tallies(
    transfers: Sequence[Transfer], done: Sequence[Slice], crcs: Sequence[int]
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
