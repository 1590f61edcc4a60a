"""Checksums of bytes: `word_sums_`, `crc32` and `copy_crc32_` in plain torch, and their calls.

    word_sums_      the sum of a tensor's bytes as 64-bit words, modulo 2**64, of each
    crc32           zlib's; copy_crc32_ copies the bytes in the same pass

Kernels of csrc/ run instead, where there are any. Only the CRCs block the host.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from layerzero.ops.schema import use_everywhere

_WORD = 8


def word_sums(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """The checksum of each tensor, int64 on their device: the sum of its bytes as 64-bit words,
    modulo 2**64. Does not block the host.

    One flipped bit changes a word by a power of two below 2**64, so it always changes the sum.
    Flips in several places cancel out only if the changes of the words add up to zero.

    Args:
        tensors: at least one; of any dtypes and shapes, all on one device. The end of one that is
            no multiple of 8 bytes counts as a word that zeros complete.
    """
    whole = [each.detach().contiguous() for each in tensors]
    out = torch.empty(len(whole), dtype=torch.int64, device=whole[0].device)
    torch.ops.layerzero.word_sums_.default(out, whole)
    return out


def word_sums_(out: torch.Tensor, xs: Sequence[torch.Tensor]) -> None:
    """See `word_sums`; `xs` are contiguous."""
    torch.stack([*map(word_sum, xs)], out=out)


def word_sum(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.view(-1)
    nbytes = flat.nbytes
    if nbytes % _WORD == 0 and flat.storage_offset() * flat.element_size() % _WORD == 0:
        return flat.view(torch.int64).sum()
    whole = flat.new_zeros(-(-nbytes // _WORD) * _WORD, dtype=torch.uint8)
    whole[:nbytes] = flat.view(torch.uint8)
    return whole.view(torch.int64).sum()


def crc32(data: torch.Tensor, value: int = 0) -> int:
    """The CRC-32 (as in zlib, gzip and PNG) of `data`, contiguous uint8 on the CPU, appended to
    bytes whose CRC is `value`."""
    array: Any = data.numpy()
    return zlib.crc32(array, value)


def copy_crc32_(out: torch.Tensor, data: torch.Tensor) -> int:
    """Copy `data` to `out`, and return its CRC-32. Both are contiguous uint8 on the CPU, of one
    size, and must not overlap."""
    out.copy_(data)
    return crc32(out)


for _kernel in (word_sums_, crc32, copy_crc32_):
    use_everywhere(_kernel)
_ops = torch.ops.layerzero
run_crc32, run_copy_crc32 = _ops.crc32.default, _ops.copy_crc32_.default
"""The kernels read each byte once, and block the calling thread, but no other thread."""
