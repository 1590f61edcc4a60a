"""find_changed: native against reference, both against numpy's idea of equal bits."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from layerzero.checkpoint.delta import scan
from layerzero.ops.reference import bits_of
from tests.ops.truth import DTYPES, IMPLEMENTATIONS, REFUSAL, baseline, random_values


def run(
    implementation: str,
    main: Tensor,
    snapshot: Tensor,
    start: int = 0,
    capacity: int = 10_000,
    update: bool = False,
) -> tuple[list[int], Tensor, int]:
    beyond = 16
    all_indices = torch.full((capacity + beyond,), -7, dtype=torch.int64)
    all_values = torch.ones(capacity + beyond, dtype=snapshot.dtype)
    indices, values = all_indices[:capacity], all_values[:capacity]
    nan = scan.nan_bits(snapshot.dtype) if snapshot.is_floating_point() else 0
    if implementation == "reference":
        with mock.patch.object(scan, "_BLOCK", 500):
            count, stop = scan.find_changed_(indices, values, main, snapshot, start, update)
    elif implementation == "baseline":
        with baseline(True):
            op = torch.ops.layerzero.find_changed_.default
            count, stop = op(indices, values, main, snapshot, start, update, nan)
    else:
        count, stop = scan.find_changed(main, snapshot, start, indices, values, update)
    assert (all_indices[capacity:] == -7).all() and (all_values[capacity:] == 1).all()
    return indices[:count].tolist(), values[:count], stop


def bits(values: Tensor) -> list[int]:
    return bits_of(values).tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("main_dtype", DTYPES, ids=str)
def test_what_changed_is_found_with_its_bits(
    implementation: str, main_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    for numel in (0, 1, 7, 8, 511, 512, 513, 5000):
        main = random_values(numel + 3, main_dtype)[3:]  # unaligned
        snapshot = scan.cast(main, dtype)
        assert run(implementation, main, snapshot)[::2] == ([], numel)
        for share in (0.02, 0.5, 1.0):
            was = snapshot.clone()
            changed = torch.rand(numel) < share
            was[changed] = -was[changed]  # another bit, also for zeros and NaNs
            found, values, stop = run(implementation, main, was)
            assert (found, stop) == (changed.nonzero().view(-1).tolist(), numel)
            assert bits(values) == bits(snapshot[changed])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_search_goes_on_where_its_room_was_full(implementation: str, dtype: torch.dtype) -> None:
    """With any density of changes; the snapshot takes what is found, on request."""
    main = torch.randn(2100)
    now = scan.cast(main, dtype)
    for share in (0.02, 0.3, 1.0):
        was = now.clone()
        was[torch.rand(2100) < share] += 1
        expected = (bits_of(was) != bits_of(now)).nonzero().view(-1).tolist()
        # A kernel has a faster way for blocks of 512 that surely fit.
        for capacity in (7, 511, 512, 514, 515, 516, 1100, len(expected), 2100, 2600):
            snapshot = was.clone()
            run(implementation, main, snapshot, 0, capacity)
            assert bits(snapshot) == bits(was), "it is only read"
            found: list[int] = []
            stop = 0
            while stop < 2100:
                part, values, stop = run(implementation, main, snapshot, stop, capacity, True)
                assert stop == (part[-1] + 1 if len(part) == capacity else 2100)
                changed = torch.where(torch.arange(2100) < stop, now, was)
                assert bits(snapshot) == bits(changed)
                assert bits(values) == bits(changed[part])
                found += part
            assert found == expected
    assert run(implementation, main, was, 2100)[::2] == ([], 2100)
    assert main._version == 0, "it is only read"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unknown_elements_are_always_found(implementation: str, dtype: torch.dtype) -> None:
    for main in (random_values(600, dtype), random_values(600, torch.float32)):
        snapshot = torch.empty(600, dtype=dtype)
        bits_of(snapshot).fill_(scan.UNKNOWN)
        bits_of(main)[17] = scan.UNKNOWN
        found, values, _ = run(implementation, main, snapshot)
        assert found == list(range(600))
        assert bits(values) == bits(scan.cast(main, dtype))
        assert not run(implementation, main, values)[0], "a NaN is found once"


def test_zeros_of_both_signs_differ_and_nans_of_a_cast_do_not(implementation: str) -> None:
    main = torch.tensor([0.0, -0.0, torch.nan, -torch.nan])
    snapshot = scan.cast(main.flip(0), torch.bfloat16).flip(0)
    snapshot[:2] = 0.0
    assert run(implementation, main, snapshot)[0] == [1]


def test_any_floating_point_dtype_is_cast_and_others_are_compared_as_they_are() -> None:
    main = torch.randn(50).to(torch.float8_e4m3fn)
    snapshot = scan.cast(main, torch.bfloat16)
    snapshot[3] += 1
    assert run("wrapper", main, snapshot)[0] == [3]
    for dtype in (torch.int32, torch.bool, torch.complex64, torch.complex128):
        exact = torch.randn(50).to(dtype)
        other = exact.clone()
        other[7] = not other[7] if dtype == torch.bool else other[7] + 1
        found, values, _ = run("wrapper", exact, other)
        assert found == [7] and values[0] == exact[7]


def arguments(**changed: Any) -> list[Any]:
    given: dict[str, Any] = {
        "indices": torch.zeros(4, dtype=torch.int64),
        "values": torch.zeros(4, dtype=torch.bfloat16),
        "main": torch.ones(8),
        "snapshot": torch.zeros(8, dtype=torch.bfloat16),
        "start": 0,
    }
    return list((given | changed).values())


def freed() -> Tensor:
    tensor = torch.zeros(8)
    tensor.untyped_storage().resize_(0)
    return tensor


REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"main": torch.ones(7)}, "main has 7 elements, snapshot has 8"),
    ({"values": torch.zeros(3, dtype=torch.bfloat16)}, "indices has 4 .*values has 3"),
    ({"values": torch.zeros(4)}, "values have the dtype of snapshot"),
    ({"indices": torch.zeros(4)}, "indices must be int64"),
    ({"indices": torch.zeros(0).long(), "values": torch.zeros(0)}, "at least one element"),
    ({"main": torch.ones(16)[::2]}, "main must be contiguous"),
    ({"start": 9}, "start 9 is outside of 8"),
    ({"start": -1}, "start -1 is outside of 8"),
)


@pytest.mark.skipif("kernel" not in IMPLEMENTATIONS, reason="no native kernels")
def test_what_does_not_fit_is_refused() -> None:
    for changed, text in (*REFUSED, ({"main": freed()}, "the storage of main holds 0 bytes")):
        given = arguments(**changed)
        with pytest.raises(REFUSAL, match=text):
            torch.ops.layerzero.find_changed_(*given)
        assert not given[0].any() and not given[1].any()
