"""Combines CRC-32 checksums of runs that many ranks write or read, in any order.

Note [Checksums add up]
    A CRC is linear: the CRC of a whole is the XOR of the CRCs of its parts, each shifted to its
    place, that is, multiplied by x ** (8 * bytes behind it) modulo the polynomial. So the checksum
    of a tensor that no process sees as a whole costs four bytes from each process, and does not
    depend on how the tensor is split. (Mark Adler, crc32_combine in zlib; here for arrays.)
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from layerzero.verify.checksums import run_copy_crc32, run_crc32

_WORTH_A_CALL_NBYTES = 1 << 14
"""From this size on, the kernel in csrc/ is faster than zlib, which has a lower call overhead."""
_POLYNOMIAL = np.uint32(0xEDB88320)
_ONE = np.uint32(1)
_BITS: NDArray[np.uint32] = np.arange(32, dtype=np.uint32)[:, None]
_Crcs = NDArray[np.uint32]


def crc32(data: memoryview | bytes, value: int = 0) -> int:
    """CRC-32 (that of zlib, gzip and PNG) of `data`, continuing from the CRC `value`."""
    if len(data) < _WORTH_A_CALL_NBYTES or isinstance(data, bytes) or data.readonly:
        return zlib.crc32(data, value)
    crc: int = run_crc32(torch.frombuffer(data, dtype=torch.uint8), value)
    return crc


def copy_crc32(out: memoryview, data: memoryview) -> int:
    """Copy `data` to `out`, which is as large; returns its CRC-32."""
    if len(data) < _WORTH_A_CALL_NBYTES or data.readonly:
        out[:] = data
        return zlib.crc32(out)
    source, target = (torch.frombuffer(each, dtype=torch.uint8) for each in (data, out))
    crc: int = run_copy_crc32(target, source)
    return crc


def placed(crcs: Sequence[int], behind: Sequence[int]) -> _Crcs:
    """The CRC of each part, shifted to its place in the whole; their XOR is the whole's CRC.

    Args:
        crcs: CRC of each part by itself.
        behind: number of bytes of the whole behind each part.
    """
    result = np.array(crcs, dtype=np.uint32)
    counts = np.asarray(behind, dtype=np.int64)
    for bit, rows in enumerate(_shifts()[: int(counts.max(initial=0)).bit_length()]):
        result = np.where(counts >> bit & 1, _times(result, rows), result)
    return result


def combine(crcs: Sequence[int], nbytes: Sequence[int]) -> int:
    """CRC of the concatenation of parts, from their CRCs and sizes."""
    ends = np.cumsum(np.asarray(nbytes, dtype=np.int64))
    if not len(ends):
        return 0
    return int(np.bitwise_xor.reduce(placed(crcs, list(ends[-1] - ends))))


@functools.cache
def _shifts() -> _Crcs:
    """[63, 32]: for each bit i of a byte count, what makes `_times` multiply by x ** (8 * 2 ** i).

    Row i has the products of that power with x ** 31, ..., x ** 0: those of single bits.
    """
    power = np.uint32(1 << 23)  # x ** 8, because bit 31 is x ** 0
    shifts = np.empty((63, 32), dtype=np.uint32)
    for rows in shifts:
        for bit in range(31, -1, -1):
            rows[bit] = power
            power = power >> _ONE ^ (_POLYNOMIAL if power & _ONE else np.uint32(0))
        power = _times(rows[31:], rows)[0]  # squared
    return shifts


def _times(a: _Crcs, rows: _Crcs) -> _Crcs:
    """Product of each element of `a` modulo the polynomial with the factor that `rows` is of."""
    bits = a >> _BITS & _ONE
    return np.bitwise_xor.reduce(bits * rows[:, None], axis=0)
