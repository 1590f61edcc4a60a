"""The ops in plain torch: their definition, and the fallback where no native kernel was built.

    pack_           out = cast(compute(source) * scale), or zeros
    ordered_sum_    out = cast((compute(parts[0]) + parts[1] + ...) * scale)
    word_sums_      the sum of a tensor's bytes as 64-bit words, modulo 2**64, of each
    crc32           zlib's; copy_crc32_ copies the bytes in the same pass

compute is float64 for float64 and float32 for the other dtypes. The result is rounded once to out's
dtype, at the end. (torch casts float64 to a 16-bit dtype through float32, and so do we.) With a
scale of 1 nothing is multiplied. Nothing here blocks the host, except for the CRCs. Arguments are
not checked, as native kernels check them: here torch's own operations stay inside their tensors.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from typing import Any

import torch

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_WORD = 8


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of `dtype` are scaled and added."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def pack_(
    out: torch.Tensor,
    srcs: Sequence[torch.Tensor],
    segs: torch.Tensor,
    scale: float,
    nt: bool = False,
) -> None:
    """See `layerzero.ops.pack_`. `segs` are on the CPU, whatever the device of the others, so that
    reading them does not block the host. Also moves integers and complex numbers, with scale 1."""
    table = segs.tolist()
    flat = out.detach().view(-1)
    targets: list[torch.Tensor] = []
    parts: list[torch.Tensor] = []
    zeros: list[torch.Tensor] = []
    sizes = [stop[2] - start[2] for start, stop in itertools.pairwise(table)]
    for target, (index, offset, _) in zip(flat.split_with_sizes(sizes), table, strict=False):
        count = target.numel()
        if not count:
            continue
        if index < 0 or not srcs[index].numel():
            zeros.append(target)
            continue
        source = srcs[index].detach().reshape(-1)
        targets.append(target)
        parts.append(source if count == source.numel() else source[offset : offset + count])
    if zeros:
        torch._foreach_zero_(zeros)
    if not targets:
        return
    if scale == 1.0:
        torch._foreach_copy_(targets, parts)
    elif compute_dtype(parts[0].dtype) == out.dtype:
        # out has the compute dtype: the copy widens exactly, so scaling in place rounds only once.
        torch._foreach_copy_(targets, parts)
        torch._foreach_mul_(targets, scale)
    else:
        for target, part in zip(targets, parts, strict=True):
            target.copy_(part.to(compute_dtype(part.dtype)).mul(scale))


def ordered_sum_(out: torch.Tensor, parts: Sequence[torch.Tensor], scale: float) -> None:
    """See `layerzero.ops.ordered_sum_`."""
    dtype = out.dtype if out.is_complex() else compute_dtype(parts[0].dtype)
    first = parts[0].detach().reshape(-1)
    # Sum directly into out, without a temporary, if it has the dtype of the sum and is not the
    # memory of a part that is still to be read.
    in_place = dtype == out.dtype and all(not _same_memory(out, part) for part in parts[1:])
    if not in_place:
        total = first.to(dtype, copy=True)
    elif _same_memory(out, parts[0]):
        total = out.detach().view(-1)
    else:
        total = out.detach().view(-1).copy_(first)
    for part in parts[1:]:
        total.add_(part.detach().reshape(-1))
    if scale != 1.0:
        total.mul_(scale)
    if not in_place:
        out.detach().view(-1).copy_(total)


def _same_memory(out: torch.Tensor, source: torch.Tensor) -> bool:
    return (
        out.dtype == source.dtype
        and out.data_ptr() == source.data_ptr()
        and source.is_contiguous()
        and out.numel() == source.numel()
    )


def word_sums_(out: torch.Tensor, xs: Sequence[torch.Tensor]) -> None:
    """See `layerzero.ops.word_sums`; `xs` are contiguous."""
    if xs:
        torch.stack([word_sum(each) for each in xs], out=out)


def word_sum(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.view(-1)
    nbytes = flat.nbytes
    if nbytes % _WORD == 0 and flat.storage_offset() * flat.element_size() % _WORD == 0:
        return flat.view(torch.int64).sum()
    whole = flat.new_zeros(-(-nbytes // _WORD) * _WORD, dtype=torch.uint8)
    whole[:nbytes] = flat.view(torch.uint8)
    return whole.view(torch.int64).sum()


def crc32(data: torch.Tensor, value: int = 0) -> int:
    array: Any = data.numpy()
    return zlib.crc32(array, value)


def copy_crc32_(out: torch.Tensor, data: torch.Tensor) -> int:
    out.copy_(data)
    return crc32(out)
