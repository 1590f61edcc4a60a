"""One tensor after the other, whole, in bounded memory, compared with its checksum."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from layerzero.checkpoint.format.crc import crc32
from layerzero.checkpoint.source import Place, check_crc
from layerzero.state_dict.errors import CheckpointError

CHUNK_NBYTES = 8 << 20
"""Held in memory at a time; a multiple of the size of every element."""


def read_verified(folder: Path, name: str, place: Place) -> Iterator[memoryview]:
    """The bytes of a tensor in writable chunks of whole elements, each valid until the next.

    Trust none of them before the iterator has ended: the checksum is that of all.

    Raises:
        CheckpointError: they are not what was written, or the file ends before.
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
    """Read all of it: the system may give less than it was asked for."""
    done = 0
    while done < len(chunk):
        nbytes = os.preadv(descriptor, [chunk[done:]], offset + done)
        if not nbytes:
            raise CheckpointError(f"{where}: damaged: the file ends inside it, at {offset + done}")
        done += nbytes
