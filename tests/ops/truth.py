"""An independent computation of what the ops promise (numpy and integers), and how to call them."""

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import layerzero
from layerzero.ops import Segments, native_status, reference
from layerzero.ops.reference import bits_of
from layerzero.optim import step_ops

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
IMPLEMENTATIONS = ["reference", *(["kernel", "baseline"] if native_status().native else [])]
"""baseline: the kernel as it runs on a processor without AVX2."""
REFUSAL = (ValueError, RuntimeError)
"""RuntimeError is what torch makes of the kernels' ValueError from 2.15 on."""


def concatenate(numels: Sequence[int], alignment: int = 1, multiple: int = 1) -> Segments:
    """Whole sources one after another, at multiples of `alignment`, padded to `multiple`."""
    rows, end = [], 0
    for source, count in enumerate(numels):
        start = -(-end // alignment) * alignment
        rows.append((source, 0, start, count))
        end = start + count
    return Segments.build(rows, -(-end // multiple) * multiple)


def random_values(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Any bit patterns: subnormals, infinities and NaNs among them; half of them of usual size."""
    bits = torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8).view(dtype)
    return torch.where(torch.rand(numel) < 0.5, bits, torch.randn(numel).to(dtype))


def every_16_bit_value(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)


def around_the_middle_of_two(dtype: torch.dtype) -> torch.Tensor:
    """float32 values half-way between neighbours of 16 bits, and those beside them."""
    grid = torch.arange(1 << 15).to(torch.int16).view(dtype).float()
    grid = grid[grid.isfinite()]
    middle = (grid[:-1].double() + grid[1:].double()) / 2
    exact = middle.float()
    assert (exact.double() == middle).all()
    infinity = torch.full_like(exact, torch.inf)
    largest = torch.tensor([65519.0, 65520.0, 3.38953138925e38, 3.4e38])
    values = torch.cat([exact, exact.nextafter(infinity), exact.nextafter(-infinity), largest])
    return torch.cat([values, -values])


def special_values(source: torch.dtype, target: torch.dtype) -> list[torch.Tensor]:
    """What a cast may get wrong: all 16-bit values, and values half-way between two of them."""
    halves, found = (torch.float16, torch.bfloat16), []
    if source in halves:
        found.append(every_16_bit_value(source))
    if source == torch.float32 and target in halves:
        found.append(around_the_middle_of_two(target))
    return found


def with_threads(*counts: int) -> Iterator[int]:
    """Each count in turn, as the number of torch's threads."""
    threads = torch.get_num_threads()
    try:
        for count in counts:
            torch.set_num_threads(count)
            yield count
    finally:
        torch.set_num_threads(threads)


def library() -> ctypes.CDLL:
    return ctypes.CDLL(str(next(Path(layerzero.__file__).parent.glob("_C.*so"))))


def call(implementation: str, op: str, *args: Any) -> None:
    if implementation == "reference":
        getattr(reference if hasattr(reference, op) else step_ops, op)(*args)
        return
    with baseline(implementation == "baseline"):
        getattr(torch.ops.layerzero, op).default(*args)


@contextlib.contextmanager
def baseline(wanted: bool) -> Iterator[None]:
    """If wanted, kernels run as on a processor without AVX2."""
    if not wanted:
        yield
        return
    loaded = library()
    loaded.layerzero_force_baseline(1)
    try:
        yield
    finally:
        loaded.layerzero_force_baseline(0)


def widened(values: torch.Tensor) -> np.ndarray:
    """In the dtype the ops compute in; numpy knows no bfloat16."""
    if values.dtype == torch.bfloat16:
        bits = values.view(torch.int16).numpy().astype(np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32)
    array = values.numpy()
    return array.astype(np.float64 if values.dtype == torch.float64 else np.float32)


def scaled(values: torch.Tensor, scale: float) -> np.ndarray:
    array = widened(values)
    with np.errstate(all="ignore"):
        return array if scale == 1.0 else array * array.dtype.type(scale)


def narrowed(values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    with np.errstate(all="ignore"):
        if dtype == torch.float64:
            return torch.from_numpy(values.astype(np.float64))
        single = values.astype(np.float32)
        if dtype == torch.float32:
            return torch.from_numpy(single)
        if dtype == torch.float16:
            return torch.from_numpy(single.astype(np.float16))
        return _to_bfloat16(single)


def _to_bfloat16(values: np.ndarray) -> torch.Tensor:
    """The nearer of the two neighbours; of two equally near ones that with an even last bit."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    low = bits & np.uint32(0xFFFF0000)
    high = low + np.uint32(0x10000)
    exact = values.astype(np.float64)
    # Above the largest finite value the next one stands for 2**128.
    upper = high.view(np.float32).astype(np.float64)
    upper = np.where(np.isinf(upper), np.sign(exact) * 2.0**128, upper)
    down, up = abs(exact - low.view(np.float32)), abs(upper - exact)
    odd = (low >> np.uint32(16)) & np.uint32(1) == 1
    chosen = np.where((up < down) | ((up == down) & odd), high, low)
    chosen = np.where(np.isinf(values), bits, chosen)
    chosen = np.where(np.isnan(values), np.uint32(0x7FC00000), chosen)
    return torch.from_numpy((chosen >> np.uint32(16)).astype(np.uint16).view(np.int16)).view(
        torch.bfloat16
    )


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal bits, so 0.0 is not -0.0; any NaN equals any other: torch's own payloads differ."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    flat, wanted = actual.reshape(-1), expected.reshape(-1)
    same = (bits_of(flat) == bits_of(wanted)) | (flat.isnan() & wanted.isnan())
    if not same.all():
        wrong = (~same).nonzero().view(-1)
        first = int(wrong[0])
        raise AssertionError(
            f"{len(wrong)} of {len(same)} elements differ, the first at {first}: "
            f"{flat[first]!r} instead of {wanted[first]!r}"
        )
