"""Comparisons whose message says which parameter differs, where and by how much."""

import gc
import math
import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from layerzero import CollectiveError
from layerzero.ops.reference import bits_of
from layerzero.step_ledger import Ledger
from layerzero.step_ledger.records import REASONS
from tests.harness.ranks import of_all_ranks

HAS_FMA = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
"""Whether layerzero's optimizers have the bits of torch's fused ones: else torch's arithmetic is
another."""


def assert_bitwise(actual: Tensor, expected: Tensor, what: str = "tensor") -> None:
    """Equal shape, dtype and bits (a NaN equals the same NaN, 0.0 does not equal -0.0)."""
    _assert_alike(actual, expected, what)
    same = _bits(actual) == _bits(expected)
    if not bool(same.all()):
        raise AssertionError(f"{what} is not bitwise equal: {_difference(actual, expected, same)}")


def assert_within(
    actual: Tensor, expected: Tensor, bound: Tensor | float, what: str = "tensor"
) -> None:
    """No element further off than `bound`, which `Sum` or another function here gives.

    A bound follows from arithmetic, never from what a test happened to need.
    """
    _assert_alike(actual, expected, what)
    same = (actual - expected).abs() <= bound  # False for a NaN
    if not bool(same.all()):
        place = tuple((~same).nonzero()[0].tolist())
        there = bound[place].item() if isinstance(bound, Tensor) else bound
        where = _difference(actual, expected, same)
        raise AssertionError(f"{what} differs by more than {there:.3g}: {where}")


class Sum(NamedTuple):
    """A sum, with what bounds how far the same terms in another order may be from it."""

    value: Tensor
    magnitudes: Tensor
    """The sum of the magnitudes of its terms: where they cancel, far more than the value."""
    count: int
    """Of terms."""

    @property
    def bound(self) -> Tensor:
        """Each addition rounds by half a unit of what it adds, which is at most all magnitudes, in
        either order. Two more units are for the scaling of a mean, before or after the sum."""
        return (self.count + 1) * torch.finfo(self.value.dtype).eps * self.magnitudes


def assert_close_in_float64(actual: Any, expected: Any, what: str = "tensor") -> None:
    """For other operators on the same numbers, all in float64; also mappings of tensors by name.

    They round by some 1e-15 of what they add up, and a term that is missing, scaled or in another's
    place is far above 1e-9 of the largest element: any bound between tells them apart. Sums
    that cancel are as exact as the others, so the largest of a mapping is that of all its tensors.
    """
    if not isinstance(expected, Mapping):
        actual, expected = {"": actual}, {"": expected}
    found = [value for value in expected.values() if value is not None and value.numel()]
    for value in found:
        assert value.dtype == torch.float64, f"{what}: expected float64, got {value.dtype}"
    largest = max((value.abs().max().item() for value in found), default=0.0)
    bounds = dict.fromkeys(expected, 1e-9 * largest)
    assert_same_parameters(actual, expected, bounds, what)


def of_floats(expected: Any) -> Any:
    """What equals Python's floats that were added up in another order: see
    `assert_close_in_float64`, which these are."""
    return pytest.approx(expected, rel=1e-9)


NANOSECOND_MS = 1e-6
"""What a clock tells: milliseconds that are differences of its readings are exact to this."""


def of_milliseconds(expected: float) -> Any:
    """What equals differences of readings of a clock, and sums of them."""
    return pytest.approx(expected, rel=1e-9, abs=NANOSECOND_MS)


def check_ledger(ledger: Ledger) -> None:
    """What holds for the rows of any ledger: each exposed millisecond has one reason."""
    for row in ledger.units:
        exposed = row.exposed_gather_ms + row.exposed_reduce_ms
        assert list(row.reasons) == list(REASONS)
        assert sum(row.reasons.values()) == of_milliseconds(exposed)
        assert min(row.reasons.values()) >= 0
        assert row.exposed_gather_ms <= row.gather_ms + NANOSECOND_MS
        assert row.exposed_reduce_ms <= row.reduce_ms + NANOSECOND_MS
    assert sum(ledger.parts.values()) == of_milliseconds(ledger.step_ms)


def assert_norm(
    actual: Tensor, tensors: Iterable[Tensor], norm_type: float = 2.0, what: str = "norm"
) -> None:
    """`actual` is the norm of all elements of `tensors`; the true one is computed in float64.

    A sum of powers cannot cancel: in any order it is off by at most half a unit for each of its
    additions, relative to itself; a power and a root by two units each, and twice where norms of
    parts are put together. The largest element is exact.
    """
    nothing = torch.zeros(1, dtype=torch.float64)
    values = torch.cat([nothing, *(each.detach().flatten().double() for each in tensors)])
    true = torch.linalg.vector_norm(values, norm_type)
    eps = torch.finfo(actual.dtype).eps
    roundings = 0.0 if norm_type == math.inf else (values.numel() / 2 + 4) / norm_type + 4
    assert_within(actual.double(), true, roundings * eps * true.item(), what)


def assert_same_parameters(
    actual: Mapping[str, Tensor | None],
    expected: Mapping[str, Tensor | None],
    bounds: Mapping[str, Tensor | float] | None = None,
    what: str = "parameter",
) -> None:
    """The same names in the same order, None where None is expected; bitwise or within `bounds`.

    Also for gradients; say so with `what`.
    """
    assert list(actual) == list(expected), (
        f"{what} names: got {list(actual)}, expected {list(expected)}"
    )
    for name, value in expected.items():
        got = actual[name]
        place = f"{what} {name}" if name else what
        if value is None or got is None:
            assert value is None and got is None, (
                f"{place}: got {_kind(got)}, expected {_kind(value)}"
            )
        elif bounds is None:
            assert_bitwise(got, value, place)
        else:
            assert_within(got, value, bounds[name], place)


def assert_same_on_all_ranks(value: Any, what: str = "value") -> None:
    """Collective over the default group. Tensors are compared bitwise, anything else by `==`."""
    values = of_all_ranks(value)
    for rank, other in enumerate(values):
        where = f"{what} of rank {rank} against that of rank 0"
        if isinstance(value, Tensor):
            assert_bitwise(other, values[0], where)
        else:
            assert other == values[0], f"{where}: {other!r}, {values[0]!r}"


def _assert_alike(actual: Tensor, expected: Tensor, what: str) -> None:
    got, wanted = (f"{tuple(t.shape)} {t.dtype}" for t in (actual, expected))
    assert got == wanted, f"{what}: got {got}, expected {wanted}"


def _bits(tensor: Tensor) -> Tensor:
    return bits_of(tensor.detach().contiguous()) if tensor.is_floating_point() else tensor


def _difference(actual: Tensor, expected: Tensor, same: Tensor) -> str:
    index = tuple((~same).nonzero()[0].tolist())
    count = int((~same).sum())
    largest = (actual.double() - expected.double()).abs().max().item()
    return (
        f"{count} of {same.numel()} elements, first at {index}: got {actual[index].item()!r}, "
        f"expected {expected[index].item()!r}; largest difference {largest:.3g}"
    )


def _kind(value: Tensor | None) -> str:
    return "None" if value is None else f"a tensor {tuple(value.shape)}"


@contextmanager
def warns_on_first_rank(match: str) -> Iterator[None]:
    """One warning that matches, on rank 0; on the others none."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    matching = [each for each in caught if re.search(match, str(each.message))]
    assert len(matching) == (dist.get_rank() == 0), [str(each.message) for each in caught]
    assert all(issubclass(each.category, UserWarning) for each in matching)


@contextmanager
def recorded_warnings() -> Iterator[list[str]]:
    """Texts of all warnings inside, on this rank; there when the block ends."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield texts
        finally:
            texts += [str(each.message) for each in caught]


@contextmanager
def named(*what: object) -> Iterator[None]:
    """Say which of several cases an error is of."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in {', '.join(map(str, what))}")
        raise


def with_each_seed(run: Callable[..., object], seeds: range, *given: object) -> None:
    for seed in seeds:
        with named("seed", seed):
            run(seed, *given)
        gc.collect()  # A model that measures for its `memory_budget` does until it is gone.


def error_in_time(run: Callable[[], object], within_s: float, error: Any = CollectiveError) -> str:
    """The message of the error that `run` must raise in time."""
    start = time.monotonic()
    with pytest.raises(error) as caught:
        run()
    assert time.monotonic() - start < within_s, str(caught.value)
    return str(caught.value)
