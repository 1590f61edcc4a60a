"""The engine's own ops: pack tensors into a flat buffer, sum parts in order, compute checksums.

All of them work everywhere in plain torch (reference.py). The native library built from csrc/, if
it is in the package's folder, makes them fast, and raises ValueError (RuntimeError from torch 2.15
on) for arguments that do not fit together, before it writes anything (on a device not for sources
shorter than a table says, which the host cannot read). `native_status()` returns which of the two
runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from layerzero.ops import reference
from layerzero.ops.native import NativeStatus, has_kernel, load
from layerzero.ops.reference import ZEROS, Segments

__all__ = [
    "ZEROS",
    "NativeStatus",
    "Segments",
    "copy_crc32_",
    "crc32",
    "missing_kernels",
    "native_status",
    "note_written",
    "ordered_sum_",
    "pack_",
    "sum_squares",
    "word_sums",
]

STREAMING_NBYTES = 32 << 20
"""Outputs of this size and above are written with non-temporal stores: they would not stay in the
cache, and an ordinary store reads each cache line first. Smaller outputs stay in the cache, where
such stores are slower (benchmarks/bench_pad_copy.py)."""


_status = load(Path(__file__).parents[1])
_pack_ = torch.ops.layerzero.pack_.default  # Looked up once: each time takes 2,700 instructions.


def native_status() -> NativeStatus:
    """Return whether the native kernels run, and if not, why."""
    return _status


def missing_kernels(device: torch.device) -> str | None:
    """Why `pack_` and `ordered_sum_` run in plain torch on this device, and what to do about it.

    None if the device has kernels, or is the CPU, where installing without a compiler is a choice.
    """
    if device.type == "cpu" or has_kernel(device.type):
        return None
    is_cuda = device.type == "cuda"
    remedy = _status.reason if is_cuda else "none exist; nothing needs to be done"
    return (
        f"no kernels of layerzero for device type {device.type!r}: {remedy}. Gradients and casts "
        "are packed in plain torch, with the same results and more kernel launches for each unit"
    )


def pack_(
    out: torch.Tensor, srcs: Sequence[torch.Tensor], segs: Segments, scale: float = 1.0
) -> torch.Tensor:
    """Fill `out` with `srcs`, laid out by `segs`, cast and scaled in one pass.

    Each element is cast(compute(source) * scale) with one rounding, where compute is float64 for
    float64 sources and float32 for others; elements without a source are 0. Integers and complex
    numbers are copied unchanged, in plain torch. No autograd; does not block the host.

    Args:
        out: contiguous, `segs.numel` elements, float32, float16, bfloat16 or float64; or any other
            dtype, if all sources have the same one and `scale` is 1. Written.
        srcs: all of the same one of the four dtypes, on out's device; must not overlap out. A
            tensor without elements stands for a missing source, and zeros are written. A source is
            read in row-major order of its shape; one that is not contiguous is copied first.

    Returns:
        `out`.
    """
    if out.dtype not in reference.DTYPES:
        reference.pack_(out, srcs, segs.table, scale)
        return out
    if out.numel() != segs.numel:
        raise ValueError(f"pack_: segs cover {segs.numel} elements, out has {out.numel()}")
    table = segs.table
    if not out.is_cpu and has_kernel(out.device.type):  # Else torch reads the table, on the host.
        table = segs.on(out.device)
    _pack_(out, srcs, table, scale, out.nbytes >= STREAMING_NBYTES)
    note_written(out)
    return out


def ordered_sum_(
    out: torch.Tensor, parts: Sequence[torch.Tensor], scale: float = 1.0
) -> torch.Tensor:
    """Write the sum of `parts`, added in list order, times `scale`, into `out`.

    Adds in float32 (float64 for float64 parts), multiplies, and rounds once to out's dtype. The
    result depends only on the values. No autograd; does not block the host.

    Args:
        out: contiguous, float32, float16, bfloat16 or float64, or the complex dtype of all parts;
            written. May be exactly one of the parts, but must not overlap them otherwise.
        parts: at least one, each with as many elements as out, all of the same one of these dtypes.

    Returns:
        `out`.
    """
    if out.dtype.is_complex:
        reference.ordered_sum_(out, parts, scale)
        return out
    torch.ops.layerzero.ordered_sum_.default(out, list(parts), scale)
    note_written(out)
    return out


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


def sum_squares(x: torch.Tensor) -> torch.Tensor:
    """The sum of squares of all elements, a float64 scalar on x's device, added in float64.

    Args:
        x: float32, float16, bfloat16 or float64.
    """
    if x.device.type != "cpu":
        # A norm by itself copies x to float64 first.
        return torch._foreach_norm([x.detach()], 2.0, dtype=torch.float64)[0].square()
    out = torch.empty(1, dtype=torch.float64, device="cpu")
    torch.ops.layerzero.sum_squares_.default(out, x.detach().contiguous())
    return out[0]


def crc32(data: torch.Tensor, value: int = 0) -> int:
    """The CRC-32 (as in zlib, gzip and PNG) of `data` appended to bytes whose CRC is `value`.

    Blocks the calling thread, but no other thread.

    Args:
        data: contiguous uint8, on the CPU.
    """
    result: int = torch.ops.layerzero.crc32.default(data, value)
    return result


def copy_crc32_(out: torch.Tensor, data: torch.Tensor) -> int:
    """Copy `data` to `out`, and return its CRC-32; in one pass, so that it is read once.

    Blocks the calling thread, but no other thread.

    Args:
        out, data: contiguous uint8, on the CPU, of one size; they must not overlap.
    """
    result: int = torch.ops.layerzero.copy_crc32_.default(out, data)
    return result


def note_written(out: torch.Tensor) -> None:
    """Increment the version of `out`: autograd detects in-place changes by it, and native kernels
    do not change it. Inference tensors have no version."""
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)
