"""Packs patches for files and wires: gaps between indices instead of indices, and no pickle.

    indices  1000 1003 1010 1011      first 1000, gaps 3 7 1 of one byte each
    indices  40 41 42 43              first 40, no gaps: the indices are consecutive

At 2 % of changed elements a bfloat16 value and the gap before it take 4 bytes, against 10 in a
patch. All numbers are little-endian.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from layerzero.checkpoint.delta.patch import DeltaError, Link, Patch
from layerzero.state_dict.dtype_names import DTYPES, dtype_name

_COMPLEX128 = "C128"
"""Not a dtype of safetensors; only bytes are stored here."""
_WIDTHS = (1, 2, 4, 8)
_MAX_DIMS = 64


class Row(NamedTuple):
    """A packed patch without its bytes. Only strings, integers, lists of them, and None."""

    name: str
    aliases: Sequence[str]
    shape: Sequence[int]
    dtype: str
    """Of the values, as in safetensors."""
    first: int
    """The first index."""
    numel: int
    """Number of elements, at least 1."""
    width: int
    """Bytes of each of the numel - 1 gaps; 0: the indices are consecutive."""
    crc: int
    """CRC-32 of the bytes of gaps and values."""
    number: int
    after: int
    part: int
    parts: int
    before: int | None

    @property
    def gaps_nbytes(self) -> int:
        return self.width * (self.numel - 1)

    @property
    def values_nbytes(self) -> int:
        return self.numel * _dtype(self.dtype).itemsize


class Chain(NamedTuple):
    """What the links of all patches of one sender share."""

    stream: str
    chain: str
    sender: int
    anchor: Sequence[str]


def chain_of(patch: Patch) -> Chain:
    return Chain(*patch.link[:4])


def pack(patch: Patch) -> tuple[Row, bytes]:
    """A row, and the bytes of the gaps, followed by those of the values."""
    indices = patch.indices.cpu().numpy()
    gaps = np.diff(indices)
    largest = int(gaps.max(initial=1))
    width = next(each for each in _WIDTHS if largest < 256**each)
    consecutive = largest == 1 and int(gaps.min(initial=1)) == 1
    packed = b"" if consecutive else gaps.astype(f"<u{width}").tobytes()
    data = packed + patch.values.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    link = patch.link
    row = Row(
        patch.name,
        patch.aliases,
        patch.shape,
        _name(patch.values.dtype, patch.name),
        int(indices[0]),
        len(indices),
        0 if consecutive else width,
        crc32_of(data),
        link.number,
        link.after,
        link.part,
        link.parts,
        patch.before,
    )
    return row, data


def unpack(row: Row, chain: Chain, data: memoryview) -> Patch:
    """The patch of a checked row (`row_of`).

    Raises:
        DeltaError: the bytes are not those of the row.
    """
    where = f"{row.name!r} (patch {row.number} of rank {chain.sender}, stream {chain.stream})"
    if len(data) != row.gaps_nbytes + row.values_nbytes:
        raise DeltaError(
            f"{where}: {len(data)} bytes, expected {row.gaps_nbytes + row.values_nbytes}"
        )
    if crc32_of(data) != row.crc:
        raise DeltaError(f"{where}: damaged, its bytes do not have the checksum {row.crc:#x}")
    indices = np.ones(row.numel, dtype=np.int64)
    if row.width:
        indices[1:] = np.frombuffer(data[: row.gaps_nbytes], dtype=f"<u{row.width}")
    indices[0] = row.first
    np.cumsum(indices, out=indices)
    values = torch.frombuffer(bytearray(data[row.gaps_nbytes :]), dtype=_dtype(row.dtype))
    link = Link(
        chain.stream,
        chain.chain,
        chain.sender,
        tuple(chain.anchor),
        *(row.number, row.after, row.part, row.parts),
    )
    return Patch(
        row.name,
        torch.from_numpy(indices),
        values,
        tuple(row.shape),
        tuple(row.aliases),
        link,
        row.before,
    )


def row_of(found: Any) -> Row:
    """The row in decoded JSON.

    Raises:
        ValueError: it is none.
    """
    row = Row(*found)
    numbers = (row.first, row.numel, row.width, row.crc, row.number, row.after, row.part, row.parts)
    is_right = (
        _are_texts([row.name])
        and _are_texts(row.aliases)
        and isinstance(row.shape, (list, tuple))
        and all(_is_count(each) for each in (*numbers, *row.shape))
        and len(row.shape) <= _MAX_DIMS
        and _is_count(math.prod(row.shape))
        and row.numel > 0
        and row.width in (0, *_WIDTHS)
        and (row.before is None or _is_count(row.before))
    )
    if not is_right:
        raise ValueError(f"not the row of a patch: {found!r:.200}")
    _dtype(row.dtype)
    return row


def chain_from(found: Any) -> Chain:
    """The chain in decoded JSON.

    Raises:
        ValueError: it is none.
    """
    chain = Chain(*found)
    names = _are_texts([chain.stream, chain.chain]) and _are_texts(chain.anchor)
    if not names or not _is_count(chain.sender):
        raise ValueError(f"not the chain of a sender: {found!r:.200}")
    return chain


def _are_texts(found: Any) -> bool:
    return isinstance(found, (list, tuple)) and all(isinstance(each, str) for each in found)


def _is_count(found: Any) -> bool:
    return type(found) is int and 0 <= found < 1 << 63


def crc32_of(data: bytes | memoryview) -> int:
    return zlib.crc32(data)


def _name(dtype: torch.dtype, tensor: str) -> str:
    return _COMPLEX128 if dtype == torch.complex128 else dtype_name(dtype, tensor)


def _dtype(name: str) -> torch.dtype:
    if name == _COMPLEX128:
        return torch.complex128
    if name not in DTYPES:
        raise ValueError(f"unknown dtype {name!r:.40}")
    return DTYPES[name]
