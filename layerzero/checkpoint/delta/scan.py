"""find_changed: which elements of a cast differ from a snapshot, in one pass.

    main      0.11   0.52   0.30   0.70        cast to the snapshot's dtype, and compared
    snapshot  0.11   0.50   0.30   0.75        bit for bit with it
    indices          1             3
    values           0.52          0.70

`find_changed_` runs where the library built from csrc/ has no kernel (ops/schema.py).

Note [One NaN]
    Every NaN that a cast makes has the same bits (`nan_bits`): torch's casts leave other NaNs in
    vector code than elsewhere, and native kernels yet others, which would look like a change.
    Without a cast, bits stay as they are. One NaN is never a result: a snapshot with its bits
    (`UNKNOWN`) differs from every value.
"""

from __future__ import annotations

import functools

import torch

from layerzero.ops.reference import DTYPES, bits_of
from layerzero.ops.schema import use_everywhere

UNKNOWN = -2
"""Bits, as a signed integer, of a floating-point snapshot that equals no value."""
_BLOCK = 1 << 20
"""Elements that plain torch compares at once: it bounds the memory of the intermediate results."""


def differs(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Whether elements of two tensors of one dtype differ in any bit: [numel] bool."""
    found = bits_of(one) != bits_of(other)
    return found.any(1) if found.ndim > 1 else found


@functools.cache
def nan_bits(dtype: torch.dtype) -> int:
    """Bits, as a signed integer, of the NaN that casts to `dtype` make: those of torch's cast."""
    source = torch.float64 if dtype == torch.float32 else torch.float32
    return int(bits_of(torch.full((64,), torch.nan, dtype=source, device="cpu").to(dtype))[0])


@functools.cache
def infinity_bits(dtype: torch.dtype) -> int:
    """Bits, as a signed integer, of infinity: finite values have smaller ones without their sign,
    and NaNs greater ones."""
    return int(bits_of(torch.full((1,), torch.inf, dtype=dtype, device="cpu"))[0])


def cast(main: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy of `main` in `dtype`, as `find_changed` compares and writes it; see Note [One NaN]."""
    new = main.detach().to(dtype, copy=True)
    if dtype.is_floating_point:
        bits = bits_of(new)
        replaced = bits == UNKNOWN if main.dtype == dtype else new.isnan()
        bits.masked_fill_(replaced, nan_bits(dtype))
    return new


def find_changed(
    main: torch.Tensor,
    snapshot: torch.Tensor,
    start: int,
    indices: torch.Tensor,
    values: torch.Tensor,
    update: bool = False,
) -> tuple[int, int]:
    """Write indices and cast values of the elements whose cast differs from `snapshot` in any bit.

    Blocks the host, also on a device: the result is a number of elements.

    Args:
        main: [numel], contiguous.
        snapshot: [numel], contiguous, on main's device, in the dtype to cast to; any floating-point
            dtype that plain torch casts to, or main's own dtype.
        start: the first element to compare.
        indices: [capacity] int64, capacity at least 1. Written, in rising order; elements behind
            the results are undefined afterwards.
        values: [capacity] in the snapshot's dtype. Written in the same way.
        update: write the values into the snapshot as well.

    Returns:
        (count, stop): `count` elements of `indices` and `values` are results, and elements
        [start, stop) were compared; stop is numel unless `capacity` elements were found before.
    """
    if main.dtype in DTYPES and snapshot.dtype in DTYPES:
        found: tuple[int, int] = torch.ops.layerzero.find_changed_.default(
            indices, values, main, snapshot, start, update, nan_bits(snapshot.dtype)
        )
        return found
    return find_changed_(indices, values, main, snapshot, start, update)


def find_changed_(
    indices: torch.Tensor,
    values: torch.Tensor,
    main: torch.Tensor,
    snapshot: torch.Tensor,
    start: int,
    update: bool = False,
    nan: int = 0,
) -> tuple[int, int]:
    """See `find_changed`. `nan`, the bits of the NaN that casts make, is for native kernels."""
    count, stop = 0, start
    while stop < main.numel() and count < indices.numel():
        end = min(stop + _BLOCK, main.numel())
        new = cast(main[stop:end], snapshot.dtype)
        found = differs(new, snapshot[stop:end]).nonzero().view(-1)
        room = indices.numel() - count
        if found.numel() >= room:
            found = found[:room]
            end = stop + int(found[-1]) + 1
        torch.add(found, stop, out=indices[count : count + found.numel()])
        values[count : count + found.numel()] = new[found]
        if update:
            snapshot[stop:end][found] = new[found]
        count, stop = count + found.numel(), end
    return count, stop


use_everywhere(find_changed_)
