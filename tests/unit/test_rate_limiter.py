"""The gather budget: how it is written, and what it admits."""

from __future__ import annotations

import math
from typing import Any

import pytest

from layerzero.config import GatherBudget, parse_nbytes
from layerzero.step.context import RateLimiter


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("1B", 1), ("512MB", 512_000_000), ("1.5 GiB", 3 << 29), ("2gb", 2 * 10**9), ("3KiB", 3072)],
)
def test_sizes_are_read(text: str, nbytes: int) -> None:
    assert parse_nbytes(text, "size") == nbytes


@pytest.mark.parametrize(
    "value", ["", "GB", "12", "-1MB", "1 parsec", None, True, math.inf, math.nan, [1]]
)
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"size: expected a size such as '512MB' or '2GiB', got "):
        parse_nbytes(value, "size")


def test_numbers_of_bytes_are_read_and_have_a_least() -> None:
    assert [parse_nbytes(value, "size", least=12) for value in (12, 64e6)] == [12, 64_000_000]
    for value in (11, "0MB", -1):
        with pytest.raises(ValueError, match=f"size: expected at least 12 B, got {value!r}"):
            parse_nbytes(value, "size", least=12)


@pytest.mark.parametrize(
    ("value", "budget"),
    [
        (False, GatherBudget()),
        (True, GatherBudget(max_units=3)),
        (5, GatherBudget(max_units=5)),
        ("2GB", GatherBudget(max_nbytes=2 * 10**9)),
    ],
)
def test_the_argument_is_read(value, budget: GatherBudget) -> None:
    assert GatherBudget.parse(value, default_units=3) == budget


def test_units_are_counted() -> None:
    limiter = RateLimiter(GatherBudget(max_units=2))
    limiter.acquire(10)
    assert limiter.admits(10**12)
    limiter.acquire(10)
    assert not limiter.admits(1)
    limiter.release(10)
    assert limiter.admits(1)


def test_bytes_are_counted() -> None:
    limiter = RateLimiter(GatherBudget(max_nbytes=100))
    limiter.acquire(60)
    assert limiter.admits(40)
    assert not limiter.admits(41)
    limiter.release(60)
    assert limiter.admits(100)


def test_without_a_budget_everything_is_admitted() -> None:
    limiter = RateLimiter(GatherBudget())
    limiter.acquire(10**15)
    assert limiter.admits(10**15)
