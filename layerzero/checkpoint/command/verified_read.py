"""Reads a whole tensor in bounded memory and verifies its checksum."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from layerzero.checkpoint.format.crc import crc32
from layerzero.checkpoint.source import Location, check_crc
from layerzero.state_dict.errors import CheckpointError

CHUNK_NBYTES = 8 << 20
"""Bytes held in memory at a time; a multiple of every element size."""


def read_verified(folder: Path, name: str, place: Location) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in writable chunks of whole elements, each valid until the next.

    The data is verified only when the iterator ends, because the checksum covers the whole tensor.

    Raises:
        CheckpointError: the bytes are not those that were written, or the file is too short.
        OSError: the file cannot be read.
    """
    entry = place.entry
    buffer = memoryview(bytearray(min(CHUNK_NBYTES, entry.nbytes)))
    where = f"{folder / place.file}: {name}"
    crc, offset = 0, entry.begin
    descriptor = os.open(folder / place.file, os.O_RDONLY)
    try:
        while offset < entry.end:
            chunk = buffer[: entry.end - offset]
            _fill(descriptor, chunk, offset, where)
            crc = crc32(chunk, crc)
            offset += len(chunk)
            yield chunk
    finally:
        os.close(descriptor)
    check_crc(where, crc, place.crc)


def _fill(descriptor: int, chunk: memoryview, offset: int, where: str) -> None:
    """Fill `chunk`; loops because `preadv` may return fewer bytes than requested."""
    done = 0
    while done < len(chunk):
        nbytes = os.preadv(descriptor, [chunk[done:]], offset + done)
        if not nbytes:
            raise CheckpointError(f"{where}: damaged: the file ends inside it, at {offset + done}")
        done += nbytes
