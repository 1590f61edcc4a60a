"""The engine's own ops: pack tensors into a flat buffer, sum parts in order.

All of them work everywhere in plain torch (reference.py). The native library built from csrc/, if
it is in the package's folder, makes them fast, and raises ValueError (RuntimeError from torch 2.15
on) for arguments that do not fit together, before it writes anything (on a device not for sources
shorter than a table says, which the host cannot read). `native_status()` returns which of the two
runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from layerzero.ops import reference
from layerzero.ops.native import NativeStatus, has_kernel, load
from layerzero.ops.reference import ZEROS, Segments

__all__ = [
    "ZEROS",
    "NativeStatus",
    "Segments",
    "native_status",
    "note_written",
    "ordered_sum_",
    "pack_",
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


def note_written(out: torch.Tensor) -> None:
    """Increment the version of `out`: autograd detects in-place changes by it, and native kernels
    do not change it. Inference tensors have no version."""
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)
