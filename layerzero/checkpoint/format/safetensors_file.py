"""Writes and parses the head of a safetensors file.

The safetensors library is not used, because ranks write in place, at offsets planned before.

    8 bytes, little-endian: length of the header | the header: JSON | the bytes of all tensors

The header maps each name to dtype, shape and [begin, end) in the bytes after it. Nothing in such a
file is ever executed. (Format: https://github.com/huggingface/safetensors, README.)
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from layerzero.state_dict.dtype_names import DTYPES, dtype_name

_LENGTH_NBYTES = 8
_ALIGNMENT = 64
"""Alignment of the first tensor, so that readers that mmap the file can use tensors in place."""
_MAX_HEADER_NBYTES = 100_000_000
"""The library's limit; a longer header counts as damage."""


class TensorEntry(NamedTuple):
    """Dtype, shape and place of a tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    """Byte offset in the file."""
    file: str = ""
    """Its name."""
    crc: int | None = None
    """CRC-32 of the tensor's bytes, if known."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def end(self) -> int:
        return self.begin + self.nbytes


def make_head(
    tensors: Sequence[tuple[str, torch.dtype, Sequence[int]]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, TensorEntry]]:
    """The bytes before the first tensor, and the entries of all tensors, laid out in order."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    places = []
    for name, dtype, shape in tensors:
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": dtype_name(dtype, name),
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
        places.append((name, TensorEntry(dtype, tuple(shape), begin)))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(_LENGTH_NBYTES + len(text)) % _ALIGNMENT)
    head = len(text).to_bytes(_LENGTH_NBYTES, "little") + text
    return head, {
        name: TensorEntry(entry.dtype, entry.shape, len(head) + entry.begin)
        for name, entry in places
    }


def head_nbytes(start: bytes, file_nbytes: int) -> int:
    """Number of bytes before the first tensor, from the first 8 bytes of a file.

    Raises:
        ValueError: they cannot be the first bytes of a safetensors file of that size.
    """
    length = int.from_bytes(start[:_LENGTH_NBYTES], "little")
    if len(start) < _LENGTH_NBYTES or length > min(_MAX_HEADER_NBYTES, file_nbytes):
        raise ValueError(
            f"its header would take {length} bytes of {file_nbytes}: not a safetensors file, or "
            "truncated"
        )
    return _LENGTH_NBYTES + length


def parse_head(head: bytes, file_nbytes: int) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """The tensors of a file, in order of offset, and its metadata.

    Raises:
        ValueError: the header is damaged, does not fit the size of the file, or names a dtype that
            is not in `DTYPES`.
    """
    try:
        header = json.loads(head[_LENGTH_NBYTES:])
        metadata = header.pop("__metadata__", None) or {}
        metadata = {str(key): str(value) for key, value in metadata.items()}
        entries: dict[str, tuple[TensorEntry, int]] = {}
        for name, described in header.items():
            begin, stop = (_count(offset) for offset in described["data_offsets"])
            shape = tuple(_count(size) for size in described["shape"])
            if described["dtype"] not in DTYPES:
                raise ValueError(
                    f"{name} has the unsupported dtype {described['dtype']}; supported are "
                    f"{', '.join(DTYPES)}"
                )
            entry = TensorEntry(DTYPES[described["dtype"]], shape, len(head) + begin)
            entries[name] = (entry, len(head) + stop)
        ordered = sorted(entries.items(), key=lambda item: (item[1][0].begin, item[1][1]))
        end = len(head)
        for name, (entry, stop) in ordered:
            if entry.begin != end or stop != entry.end:
                raise ValueError(
                    f"the header places {name!r}, {entry.nbytes} bytes, at {entry.begin} to "
                    f"{stop}, after a tensor that ends at {end}"
                )
            end = stop
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"its header cannot be read: {error!r}") from error
    if end != file_nbytes:
        raise ValueError(f"its header describes {end} bytes, the file has {file_nbytes}")
    return {name: entry for name, (entry, _) in ordered}, metadata


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"expected a size or offset, got {value!r}")
    return value
