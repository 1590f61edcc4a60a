"""CRC-32 of a file that many ranks write or read, each its own runs, in any order.

Note [Checksums add up]
    A CRC is linear: the CRC of a whole is the exclusive or of the CRCs of its parts, each moved to
    its place, that is, multiplied by x ** (8 * bytes behind it) modulo the polynomial. So a
    checksum of what one process never saw as a whole costs four bytes of each process, and does
    not depend on how the whole was cut. (Mark Adler, crc32_combine in zlib; here for arrays.)
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from layerzero import ops

_WORTH_A_CALL_NBYTES = 1 << 14
"""From here on the kernel of csrc/ is faster than zlib, whose call is cheaper."""
_POLYNOMIAL = 0xEDB88320
_ONE = np.uint32(1)
_Crcs = NDArray[np.uint32]


def crc32(data: memoryview | bytes, value: int = 0) -> int:
    """CRC-32 (that of zlib, gzip and PNG) of `data`, behind bytes whose CRC is `value`."""
    if len(data) < _WORTH_A_CALL_NBYTES or isinstance(data, bytes) or data.readonly:
        return zlib.crc32(data, value)
    return ops.crc32(torch.frombuffer(data, dtype=torch.uint8), value)


def placed(crcs: Sequence[int], behind: Sequence[int]) -> _Crcs:
    """The CRC of each part as a part of its whole, to be combined by exclusive or.

    Args:
        crcs: of each part.
        behind: bytes of the whole behind each part.
    """
    result = np.asarray(crcs, dtype=np.uint32)
    remaining = np.asarray(behind, dtype=np.int64)
    for power in _powers():
        if not remaining.any():
            break
        odd = (remaining & 1).astype(bool)
        if odd.any():
            result[odd] = _multiply(result[odd], np.uint32(power))
        remaining = remaining >> 1
    return result


def combine(crcs: Sequence[int], nbytes: Sequence[int]) -> int:
    """CRC of the concatenation of parts of `nbytes`, given theirs."""
    ends = np.cumsum(np.asarray(nbytes, dtype=np.int64))
    if not len(ends):
        return 0
    return int(np.bitwise_xor.reduce(placed(crcs, list(ends[-1] - ends))))


@functools.cache
def _powers() -> list[int]:
    """x ** 8, its square, the square of that, and so on: one for each bit of a byte count."""
    powers = [0x00800000]
    while len(powers) < 63:
        powers.append(int(_multiply(np.uint32(powers[-1]), np.uint32(powers[-1]))))
    return powers


def _multiply(a: Any, b: np.uint32) -> Any:
    """Products of each of `a` with `b`, modulo the polynomial; bit 31 stands for x ** 0."""
    factor, product = int(b), a & np.uint32(0)
    for bit in range(31, -1, -1):
        product = product ^ ((a >> np.uint32(bit)) & _ONE) * np.uint32(factor)
        factor = factor >> 1 ^ (_POLYNOMIAL if factor & 1 else 0)
    return product
