"""Comparisons whose message says which parameter differs, where and by how much."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor


def assert_bitwise(actual: Tensor, expected: Tensor, what: str = "tensor") -> None:
    """Equal shape, dtype and bits (a NaN equals the same NaN, 0.0 does not equal -0.0)."""
    _assert_alike(actual, expected, what)
    same = _bits(actual) == _bits(expected)
    if not bool(same.all()):
        raise AssertionError(f"{what} is not bitwise equal: {_difference(actual, expected, same)}")


def assert_close(actual: Tensor, expected: Tensor, roundings: int, what: str = "tensor") -> None:
    """Within `roundings` units of roundoff of the largest magnitude in `expected`.

    Give the number of operations whose order or rounding may differ; 0 asks for bitwise equality.
    The unit is float32's at least: a float64 tensor that depends on float32 ones is no better.
    """
    if roundings == 0:
        assert_bitwise(actual, expected, what)
        return
    _assert_alike(actual, expected, what)
    if not expected.numel():
        return
    unit = max(torch.finfo(expected.dtype).eps, torch.finfo(torch.float32).eps)
    bound = roundings * unit * expected.abs().max().item()
    same = (actual - expected).abs() <= bound  # False for a NaN
    if not bool(same.all()):
        where = _difference(actual, expected, same)
        raise AssertionError(f"{what} differs by more than {bound:.3g}: {where}")


def assert_same_parameters(
    actual: Mapping[str, Tensor | None],
    expected: Mapping[str, Tensor | None],
    roundings: int = 0,
    what: str = "parameter",
) -> None:
    """The same names in the same order, None where None is expected, values as in `assert_close`.

    Also for gradients; say so with `what`.
    """
    assert list(actual) == list(expected), (
        f"{what} names: got {list(actual)}, expected {list(expected)}"
    )
    for name, value in expected.items():
        got = actual[name]
        if value is None or got is None:
            assert value is None and got is None, (
                f"{what} {name}: got {_kind(got)}, expected {_kind(value)}"
            )
            continue
        assert_close(got, value, roundings, f"{what} {name}")


def assert_same_on_all_ranks(value: Any, what: str = "value") -> None:
    """Collective over the default group. Tensors are compared bitwise, anything else by `==`."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
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
    if not tensor.is_floating_point():
        return tensor
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[
        tensor.element_size()
    ]
    return tensor.detach().contiguous().view(integer)


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
    if dist.get_rank() == 0:
        with pytest.warns(UserWarning, match=match) as caught:
            yield
        matching = [each for each in caught if re.search(match, str(each.message))]
        assert len(matching) == 1, [str(each.message) for each in caught]
        return
    with warnings.catch_warnings(record=True) as others:
        warnings.simplefilter("always")
        yield
    assert not [each for each in others if re.search(match, str(each.message))]
