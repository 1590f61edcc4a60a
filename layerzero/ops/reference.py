"""The ops in plain torch: their definition, and the fallback where no native kernel was built.

    pack_           out = cast(compute(source) * scale), or zeros
    ordered_sum_    out = cast((compute(parts[0]) + parts[1] + ...) * scale)
    word_sums_      the sum of a tensor's bytes as 64-bit words, modulo 2**64, of each
    checked_sum_    ordered_sum_, and word_sums_ of the parts
    crc32           zlib's; copy_crc32_ copies the bytes in the same pass

compute is float64 for float64 and float32 for the other dtypes. The result is rounded once to out's
dtype, at the end. (torch casts float64 to a 16-bit dtype through float32, and so do we.) With a
scale of 1 nothing is multiplied. Nothing here blocks the host, except for the CRCs.
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
    reading them does not block the host."""
    check_pack(out, srcs, segs)
    _fill(out, srcs, segs, scale)


def move_(
    out: torch.Tensor, srcs: Sequence[torch.Tensor], segs: torch.Tensor, scale: float
) -> None:
    """`pack_` for dtypes that are copied unchanged: integers, complex numbers."""
    if scale != 1.0:
        raise ValueError(f"pack_: {out.dtype} is only moved: expected scale 1, got {scale}")
    check_pack(out, srcs, segs, (out.dtype,))
    _fill(out, srcs, segs, scale)


def _fill(
    out: torch.Tensor, srcs: Sequence[torch.Tensor], segs: torch.Tensor, scale: float
) -> None:
    _check_memory("pack_", "source", out, srcs)
    if segs.device.type != "cpu":
        raise ValueError(
            f"pack_: segs are on {segs.device}, where reading them would block the host; pass "
            "`Segments.table`"
        )
    table = segs.tolist()
    _check_table(table, [src.numel() for src in srcs], out.numel())
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
    check_ordered_sum(out, parts)
    _add_up(out, parts, scale, compute_dtype(parts[0].dtype))


def complex_sum_(out: torch.Tensor, parts: Sequence[torch.Tensor], scale: float) -> None:
    """`ordered_sum_` for complex dtypes: parts and out have the same one, which it adds in."""
    check_ordered_sum(out, parts, (out.dtype,))
    _add_up(out, parts, scale, out.dtype)


def _add_up(
    out: torch.Tensor, parts: Sequence[torch.Tensor], scale: float, dtype: torch.dtype
) -> None:
    _check_memory("ordered_sum_", "part", out, parts, may_be_out=True)
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


def check_pack(
    out: torch.Tensor,
    srcs: Sequence[torch.Tensor],
    segs: torch.Tensor,
    dtypes: tuple[torch.dtype, ...] = DTYPES,
) -> None:
    """Raise ValueError if arguments do not fit together. Does not read tensor contents."""
    _check_out("pack_", out, dtypes)
    if segs.dtype != torch.int64 or segs.dim() != 2 or segs.shape[0] < 1 or segs.shape[1] != 3:
        raise ValueError(
            f"pack_: segs must be contiguous int64 [S + 1, 3], got {segs.dtype} {list(segs.shape)}"
        )
    if segs.device != out.device and segs.device.type != "cpu":
        raise ValueError(
            f"pack_: segs are on {segs.device}, out is on {out.device}; move them first"
        )
    _check_sources("pack_", "source", out, srcs, dtypes)


def check_ordered_sum(
    out: torch.Tensor, parts: Sequence[torch.Tensor], dtypes: tuple[torch.dtype, ...] = DTYPES
) -> None:
    """Raise ValueError if arguments do not fit together. Does not read tensor contents."""
    _check_out("ordered_sum_", out, dtypes)
    if not parts:
        raise ValueError("ordered_sum_: expected at least one part, got none")
    for index, part in enumerate(parts):
        if part.numel() != out.numel():
            raise ValueError(
                f"ordered_sum_: part {index} has {part.numel()} elements, out has {out.numel()}"
            )
    _check_sources("ordered_sum_", "part", out, parts, dtypes)


def _check_out(op: str, out: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if out.dtype not in dtypes:
        raise ValueError(f"{op}: out must be {_either(dtypes)}, got {out.dtype}")
    if not out.is_contiguous():
        raise ValueError(f"{op}: out must be contiguous; pass a contiguous buffer")


def _either(dtypes: tuple[torch.dtype, ...]) -> str:
    names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
    return " or ".join([*([", ".join(names[:-1])] if names[1:] else []), names[-1]])


def _check_sources(
    op: str,
    noun: str,
    out: torch.Tensor,
    sources: Sequence[torch.Tensor],
    dtypes: tuple[torch.dtype, ...],
) -> None:
    first = -1
    for index, source in enumerate(sources):
        if not source.numel():
            continue
        if source.layout is not torch.strided:
            raise ValueError(f"{op}: {noun} {index} is {source.layout}; pass a dense tensor")
        if source.device != out.device:
            raise ValueError(
                f"{op}: {noun} {index} is on {source.device}, out is on {out.device}; move it first"
            )
        if source.dtype not in dtypes:
            raise ValueError(f"{op}: {noun} {index} must be {_either(dtypes)}, got {source.dtype}")
        if first < 0:
            first = index
        elif source.dtype != sources[first].dtype:
            raise ValueError(
                f"{op}: one call takes one source dtype, got {sources[first].dtype} "
                f"({noun} {first}) and {source.dtype} ({noun} {index}); call once for each dtype"
            )


def _check_table(table: list[list[int]], numels: list[int], out_numel: int) -> None:
    if table[0][2]:
        raise ValueError(f"pack_: segs must begin at destination 0, row 0 begins at {table[0][2]}")
    for row, ((source, offset, start), (_, _, stop)) in enumerate(itertools.pairwise(table)):
        if stop < start:
            raise ValueError(
                f"pack_: destinations of segs must rise, row {row} begins at {start} and "
                f"row {row + 1} at {stop}"
            )
        if source < 0:
            continue
        if source >= len(numels):
            raise ValueError(
                f"pack_: row {row} of segs names source {source}, there are {len(numels)} sources"
            )
        numel = numels[source]
        if numel and (offset < 0 or offset + stop - start > numel):
            raise ValueError(
                f"pack_: row {row} of segs reads {stop - start} elements from {offset} of "
                f"source {source}, which has {numel}"
            )
    if table[-1][2] != out_numel:
        raise ValueError(f"pack_: segs cover {table[-1][2]} elements, out has {out_numel}")


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Address range [begin, end) of a strided, non-empty tensor."""
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    begin = tensor.data_ptr()
    return begin, begin + (last + 1) * tensor.element_size()


def _check_memory(
    op: str,
    noun: str,
    out: torch.Tensor,
    sources: Sequence[torch.Tensor],
    may_be_out: bool = False,
) -> None:
    _check_storage(op, "out", out)
    for index, source in enumerate(sources):
        _check_storage(op, f"{noun} {index}", source)
        if not out.numel() or not source.numel() or (may_be_out and _same_memory(out, source)):
            continue
        (begin, end), (source_begin, source_end) = _extent(out), _extent(source)
        if source_begin < end and begin < source_end:
            raise ValueError(
                f"{op}: out overlaps {noun} {index}: bytes [{begin:#x}, {end:#x}) and "
                f"[{source_begin:#x}, {source_end:#x}); pass an output of its own"
            )


def _check_storage(op: str, what: str, tensor: torch.Tensor) -> None:
    """Raise ValueError if the storage is smaller than the tensor needs.

    A view outlives its bytes when the storage is resized, and torch does not check.
    """
    if not tensor.numel():
        return
    begin, end = _extent(tensor)
    needed = tensor.storage_offset() * tensor.element_size() + end - begin
    held = tensor.untyped_storage().nbytes()
    if held < needed:
        raise ValueError(
            f"{op}: the storage of {what} holds {held} bytes, the tensor needs {needed}; "
            "its memory was freed"
        )


def _same_memory(out: torch.Tensor, source: torch.Tensor) -> bool:
    return (
        out.dtype == source.dtype
        and out.data_ptr() == source.data_ptr()
        and source.is_contiguous()
        and out.numel() == source.numel()
    )


def checked_sum_(
    out: torch.Tensor,
    sums: torch.Tensor,
    parts: Sequence[torch.Tensor],
    scale: float,
    skip: int = -1,
) -> None:
    """See `layerzero.ops.checked_sum_`."""
    contiguous = [each.detach().contiguous() for each in parts]
    if 0 <= skip < len(contiguous):
        contiguous[skip] = contiguous[skip].new_empty(0)
    # Before the sum, which may overwrite a part.
    word_sums_(sums, contiguous)
    # A device may have a kernel of this one alone.
    torch.ops.layerzero.ordered_sum_.default(out, list(parts), scale)


def word_sums_(out: torch.Tensor, xs: Sequence[torch.Tensor]) -> None:
    """See `layerzero.ops.word_sums`; `xs` are contiguous."""
    if len(xs) != out.numel():
        raise ValueError(f"word_sums_: {len(xs)} tensors, but room for {out.numel()} checksums")
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
    _check_bytes(data, "crc32")
    if not 0 <= value <= 0xFFFFFFFF:
        raise ValueError(f"crc32: expected a CRC-32 before it, got {value}")
    array: Any = data.numpy()
    return zlib.crc32(array, value)


def copy_crc32_(out: torch.Tensor, data: torch.Tensor) -> int:
    _check_bytes(out, "copy_crc32_")
    _check_bytes(data, "copy_crc32_")
    if len(out) != len(data):
        raise ValueError(f"copy_crc32_: out has {len(out)} bytes, data has {len(data)}")
    begin, other = out.data_ptr(), data.data_ptr()
    if begin < other + len(data) and other < begin + len(out):
        raise ValueError("copy_crc32_: out and data overlap")
    out.copy_(data)
    return crc32(out)


def _check_bytes(data: torch.Tensor, op: str) -> None:
    if data.dtype != torch.uint8 or not data.is_contiguous():
        raise ValueError(f"{op}: expected contiguous uint8, got {data.dtype}")
