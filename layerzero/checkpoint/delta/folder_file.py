"""One file of a DeltaFolder: a safetensors file with the packed patches of one rank.

    tensor "gaps"        uint8: the gaps between the indices of each patch (packing.py)
    tensor "values"      uint8: the values of each patch
    metadata "patches"   JSON, a row for each patch, in order
    metadata "chain"     JSON, what the links of all patches share
    metadata "senders"   JSON, the global ranks that write files for each step
    metadata "crc"       CRC-32 of the three texts before

A file is written under a hidden name, fsynced, and renamed: one that is there is complete.
"""

from __future__ import annotations

import json
import os
import stat
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from layerzero.checkpoint.delta.packing import Chain, Row, chain_from, row_of, unpack
from layerzero.checkpoint.delta.patch import DeltaError, Patch
from layerzero.checkpoint.format.folder import sync_folder, write_durably
from layerzero.checkpoint.format.safetensors_file import (
    head_nbytes,
    make_head,
    metadata_of,
    parse_head,
)

HIDDEN = ".writing-"
_GAPS, _VALUES = "gaps", "values"
_TEXTS = ("patches", "chain", "senders")


class Contents(NamedTuple):
    """What the metadata of a file says."""

    rows: Sequence[Row]
    chain: Chain | None
    """None: the file has no patches."""
    senders: Sequence[int]
    gaps: int
    values: int
    """Byte offsets of the first patch's gaps and values."""


def write_file(
    path: Path,
    packed: Sequence[tuple[Row, bytes]],
    chain: Chain | None,
    senders: Sequence[int],
) -> int:
    """Write a file that is there as a whole or not at all; returns its bytes.

    Raises:
        FileExistsError: there is one already.
    """
    described = ([row for row, _ in packed], chain, list(senders))
    texts = {
        name: json.dumps(value, separators=(",", ":"), ensure_ascii=False)
        for name, value in zip(_TEXTS, described, strict=True)
    }
    texts["crc"] = str(_crc(texts))
    gaps = b"".join(data[: row.gaps_nbytes] for row, data in packed)
    values = b"".join(data[row.gaps_nbytes :] for row, data in packed)
    tensors = [
        (name, torch.uint8, (len(data),)) for name, data in ((_GAPS, gaps), (_VALUES, values))
    ]
    head, _ = make_head(tensors, texts)
    hidden = path.with_name(HIDDEN + path.name)
    try:
        write_durably(hidden, b"".join((head, gaps, values)))
        if path.exists() or path.is_symlink():
            raise FileExistsError(f"{path}: exists already; every step is written once")
        os.rename(hidden, path)
    except BaseException:
        hidden.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
    return len(head) + len(gaps) + len(values)


def read_contents(path: Path) -> Contents:
    """What is in a file, without its patches.

    Raises:
        DeltaError: the file is damaged, or no regular file.
    """
    with _Opened(path) as opened:
        return opened.contents


def read_patches(path: Path) -> Iterator[Patch]:
    """Yield the patches of a file, checked, in order. Raises as `read_contents`."""
    with _Opened(path) as opened:
        contents = opened.contents
        gaps, values = contents.gaps, contents.values
        for row in contents.rows:
            assert contents.chain is not None, "checked: a file with rows has a chain"
            data = opened.bytes_at(gaps, row.gaps_nbytes)
            data += opened.bytes_at(values, row.values_nbytes)
            try:
                patch = unpack(row, contents.chain, memoryview(data))
            except DeltaError as error:
                raise DeltaError(f"{path}: {error}") from error
            yield patch
            gaps, values = gaps + row.gaps_nbytes, values + row.values_nbytes


class _Opened:
    """An open file with checked metadata."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> _Opened:
        # Neither a link to elsewhere, nor a pipe that blocks.
        flags = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
        try:
            if self._path.is_symlink():
                raise OSError("it is a symbolic link")
            self._file = os.fdopen(os.open(self._path, os.O_RDONLY | flags), "rb")
        except OSError as error:
            raise DeltaError(f"{self._path}: cannot be read: {error}") from error
        try:
            self.contents = self._read()
        except BaseException as error:
            self._file.close()
            if isinstance(error, (ValueError, TypeError, KeyError, RecursionError, OSError)):
                raise DeltaError(f"{self._path}: damaged, or no delta file: {error}") from error
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def bytes_at(self, begin: int, nbytes: int) -> bytes:
        self._file.seek(begin)
        return self._file.read(nbytes)

    def _read(self) -> Contents:
        status = os.fstat(self._file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is no regular file")
        length = head_nbytes(self.bytes_at(0, 8), status.st_size)
        head = self.bytes_at(0, length)
        entries = parse_head(head, status.st_size)
        texts = metadata_of(head)
        if entries.keys() != {_GAPS, _VALUES} or int(texts["crc"]) != _crc(texts):
            raise ValueError("its metadata do not have their checksum")
        rows, chain, senders = (json.loads(texts[name]) for name in _TEXTS)
        if not all(type(sender) is int for sender in senders):
            raise ValueError(f"{senders!r:.100} are no ranks")
        contents = Contents(
            [row_of(row) for row in rows],
            None if chain is None else chain_from(chain),
            senders,
            entries[_GAPS].begin,
            entries[_VALUES].begin,
        )
        expected = (
            sum(row.gaps_nbytes for row in contents.rows),
            sum(row.values_nbytes for row in contents.rows),
        )
        found = (entries[_GAPS].nbytes, entries[_VALUES].nbytes)
        if expected != found or (contents.rows and contents.chain is None):
            raise ValueError(f"it has {found} bytes of gaps and values, expected {expected}")
        return contents


def _crc(texts: Mapping[str, str]) -> int:
    return zlib.crc32("\n".join(texts[name] for name in _TEXTS).encode())
