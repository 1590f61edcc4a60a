"""find_changed: native against reference, both against numpy's idea of equal bits."""

from typing import Any

import pytest
import torch
from torch import Tensor

from layerzero import ops
from layerzero.ops import delta
from tests.ops.truth import DTYPES, IMPLEMENTATIONS, baseline, random_values


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
    nan = delta.nan_bits(snapshot.dtype) if snapshot.is_floating_point() else 0
    if implementation == "reference":
        count, stop = delta._find_changed(indices, values, main, snapshot, start, update)
    elif implementation == "baseline":
        with baseline(True):
            op = torch.ops.layerzero.find_changed_.default
            count, stop = op(indices, values, main, snapshot, start, update, nan)
    else:
        count, stop = ops.find_changed(main, snapshot, start, indices, values, update)
    assert (all_indices[capacity:] == -7).all() and (all_values[capacity:] == 1).all()
    return indices[:count].tolist(), values[:count], stop


def bits(values: Tensor) -> list[int]:
    return delta.bits_of(values).tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("main_dtype", DTYPES, ids=str)
def test_what_changed_is_found_with_its_bits(
    implementation: str, main_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    for numel in (0, 1, 7, 8, 511, 512, 513, 5000):
        main = random_values(numel + 3, main_dtype)[3:]  # unaligned
        snapshot = delta.cast(main, dtype)
        assert run(implementation, main, snapshot)[::2] == ([], numel)
        for share in (0.02, 0.5, 1.0):
            was = snapshot.clone()
            changed = torch.rand(numel) < share
            was[changed] = -was[changed]  # another bit, also for zeros and NaNs
            found, values, stop = run(implementation, main, was)
            assert (found, stop) == (changed.nonzero().view(-1).tolist(), numel)
            assert bits(values) == bits(snapshot[changed])


def test_the_search_stops_where_the_output_is_full_and_goes_on_there(implementation: str) -> None:
    main = torch.randn(3000)
    snapshot = main.bfloat16()
    changed = torch.arange(5, 3000, 7)
    snapshot[changed] += 1
    for capacity in (1, 3, 64, len(changed), len(changed) + 1):
        found: list[int] = []
        start = 0
        while start < 3000:
            part, _, stop = run(implementation, main, snapshot, start, capacity)
            assert stop == (part[-1] + 1 if len(part) == capacity else 3000)
            found, start = found + part, stop
        assert found == changed.tolist()
    assert run(implementation, main, snapshot, 3000)[::2] == ([], 3000)


def test_the_snapshot_takes_what_is_found_on_request(implementation: str) -> None:
    main = torch.randn(2000)
    snapshot = main.bfloat16()
    snapshot[torch.rand(2000) < 0.1] += 1
    before = snapshot.clone()
    found, values, stop = run(implementation, main, snapshot, 0, 50)
    assert torch.equal(snapshot, before)
    run(implementation, main, snapshot, 0, 50, update=True)
    before[found] = values
    assert torch.equal(snapshot, before) and len(found) == 50
    run(implementation, main, snapshot, stop, update=True)
    assert torch.equal(snapshot, main.bfloat16())
    assert not run(implementation, main, snapshot)[0]
    assert main._version == 0, "it is only read"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_density_of_changes_fits_any_room(implementation: str, dtype: torch.dtype) -> None:
    main = torch.randn(2100)
    for share in (0.02, 0.3, 1.0):
        was = delta.cast(main, dtype)
        was[torch.rand(2100) < share] += 1
        differs = delta.bits_of(was) != delta.bits_of(delta.cast(main, dtype))
        expected = differs.nonzero().view(-1)
        # A kernel has a faster way for blocks of 512 that surely fit.
        for capacity in (511, 512, 514, 515, 516, 1100, 2100, 2600):
            snapshot = was.clone()
            found, values, stop = run(implementation, main, snapshot, 0, capacity, update=True)
            assert found == expected[:capacity].tolist()
            changed = torch.where(torch.arange(2100) < stop, delta.cast(main, dtype), was)
            assert bits(snapshot) == bits(changed)
            assert bits(values) == bits(changed[found])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unknown_elements_are_always_found(implementation: str, dtype: torch.dtype) -> None:
    for main in (random_values(600, dtype), random_values(600, torch.float32)):
        snapshot = torch.empty(600, dtype=dtype)
        delta.bits_of(snapshot).fill_(delta.UNKNOWN)
        delta.bits_of(main)[17] = delta.UNKNOWN
        found, values, _ = run(implementation, main, snapshot)
        assert found == list(range(600))
        assert bits(values) == bits(delta.cast(main, dtype))
        assert not run(implementation, main, values)[0], "a NaN is found once"


def test_zeros_of_both_signs_differ_and_nans_of_a_cast_do_not(implementation: str) -> None:
    main = torch.tensor([0.0, -0.0, torch.nan, -torch.nan])
    snapshot = delta.cast(main.flip(0), torch.bfloat16).flip(0)
    snapshot[:2] = 0.0
    assert run(implementation, main, snapshot)[0] == [1]


def test_any_floating_point_dtype_is_cast_and_others_are_compared_as_they_are() -> None:
    main = torch.randn(50).to(torch.float8_e4m3fn)
    snapshot = delta.cast(main, torch.bfloat16)
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
        with pytest.raises(ValueError, match=text):
            torch.ops.layerzero.find_changed_(*given)
        assert not given[0].any() and not given[1].any()
