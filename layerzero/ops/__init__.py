"""The engine's own data movement: pack tensors into a flat buffer, sum parts in order, checksums.

All work everywhere through plain torch (reference.py); the library built from csrc/, found in the
package's folder, makes them fast. `native_status()` says which of the two it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from layerzero.ops import reference, schema
from layerzero.ops.native import NativeStatus, load
from layerzero.ops.segments import ZEROS, Segments

__all__ = ["ZEROS", "NativeStatus", "Segments", "crc32", "native_status", "ordered_sum_", "pack_"]

STREAMING_NBYTES = 32 << 20
"""From this size on an output is written past the cache: it would not stay there, and a plain store
reads each line first. In the cache such stores hurt; benchmarks/bench_pad_copy.py."""

assert schema.LIBRARY is not None, "the schemas must be there before the kernels are"
_status = load(Path(__file__).parents[1])


def native_status() -> NativeStatus:
    """Whether the compiled kernels run, and if not, why."""
    return _status


def pack_(
    out: torch.Tensor,
    srcs: Sequence[torch.Tensor],
    segs: Segments,
    scale: float = 1.0,
    nt: bool | None = None,
) -> torch.Tensor:
    """Fill `out` with `srcs`, laid out by `segs`, cast and scaled in one pass.

    An element is cast(compute(source) * scale) with one rounding, where compute is float64 for
    float64 sources and else float32; what has no source is 0. Integers and complex numbers move
    as they are, through plain torch. No autograd; does not block the host.

    Args:
        out: contiguous, `segs.numel` elements, float32, float16, bfloat16 or float64; or any other
            dtype that all sources have too, with a scale of 1. Written.
        srcs: all of one of the four dtypes, on out's device, apart from out's memory. A tensor
            without elements stands for a missing source: zeros. A source is read in row-major order
            of its shape; one that is neither contiguous nor (on the CPU) a transposed matrix is
            copied first.
        nt: write past the cache (CPU); None: for outputs from `STREAMING_NBYTES` on.

    Returns:
        `out`.

    Raises:
        ValueError: the arguments do not fit together; nothing was written.
    """
    if out.dtype not in reference.DTYPES:
        reference.move_(out, srcs, segs.on(out.device), scale)
        return out
    if out.numel() != segs.numel:
        raise ValueError(f"pack_: segs cover {segs.numel} elements, out has {out.numel()}")
    if out.device.type != "cpu":
        segs.check_sources([src.numel() for src in srcs])
    if nt is None:
        nt = out.nbytes >= STREAMING_NBYTES
    torch.ops.layerzero.pack_.default(out, srcs, segs.on(out.device), scale, nt)
    _note_written(out)
    return out


def ordered_sum_(
    out: torch.Tensor, parts: Sequence[torch.Tensor], scale: float = 1.0
) -> torch.Tensor:
    """Write the sum of `parts`, taken in the order of the list, times `scale`, into `out`.

    Adds in float32 (float64 for float64 parts), multiplies, and rounds once to out's dtype; the
    result depends on nothing but the values. No autograd; does not block the host.

    Args:
        out: contiguous, float32, float16, bfloat16 or float64, or complex as all parts; written.
            May be exactly one of the parts, and must not overlap them otherwise.
        parts: at least one, each of out's number of elements, all of one of these dtypes.

    Returns:
        `out`.

    Raises:
        ValueError: the arguments do not fit together; nothing was written.
    """
    if out.dtype.is_complex:
        reference.complex_sum_(out, parts, scale)
        return out
    torch.ops.layerzero.ordered_sum_.default(out, list(parts), scale)
    _note_written(out)
    return out


def crc32(data: torch.Tensor, value: int = 0) -> int:
    """The CRC-32 (that of zlib, gzip and PNG) of bytes behind others whose CRC is `value`.

    Blocks the host, but not its other threads.

    Args:
        data: contiguous uint8, on the CPU.

    Raises:
        ValueError: it is not.
    """
    result: int = torch.ops.layerzero.crc32.default(data, value)
    return result


def _note_written(out: torch.Tensor) -> None:
    """Autograd notices in-place changes by the version, and a kernel from outside moves none."""
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)
