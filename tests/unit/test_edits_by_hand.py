"""The line through elements of a gradient before and after a program has changed it."""

from __future__ import annotations

import math

import pytest
import torch

from layerzero.optim import edits_by_hand
from layerzero.optim.edits_by_hand import Edit, difference, fit, is_edited


def values(n: int = 16) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(0))


def fitted(old: torch.Tensor, new: torch.Tensor) -> Edit | None:
    return fit(old.tolist(), new.tolist(), torch.finfo(old.dtype).eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("factor", "offset"), [(1, 0), (0.37, 0), (12, 0), (1, 0.5), (0.2, -3)])
def test_a_factor_and_an_offset_are_found(factor: float, offset: float, dtype: torch.dtype) -> None:
    old = values().to(dtype)
    edit = fitted(old, old * factor + offset)
    assert edit is not None
    assert math.isclose(edit.factor, factor, rel_tol=edit.tolerance)
    assert math.isclose(edit.offset, offset, rel_tol=30 * edit.tolerance)
    assert is_edited(edit) == ((factor, offset) != (1, 0))


def test_the_tolerance_covers_what_rounding_turns_the_line_by() -> None:
    # Large beside their spread, as weights of a norm are: rounding is large beside it too.
    old = (1 + 0.02 * values()).to(torch.bfloat16)
    for factor in (0.5, 0.77, 1.5, 3.1):
        edit = fit(old.tolist(), (old * factor).tolist(), torch.finfo(old.dtype).eps, 1e-6)
        assert edit is not None
        assert 1e-2 < edit.tolerance < 2
        assert math.isclose(edit.factor, factor, rel_tol=edit.tolerance)
    edit = fit(values().tolist(), (values() * 2).tolist(), torch.finfo(torch.float32).eps, 1e-4)
    assert edit is not None
    assert 1e-4 < edit.tolerance < 1.02e-4


def test_a_message_tells_factors_apart_that_differ_by_the_smallest_tolerance() -> None:
    assert str(of(1.00012)) == "1.0001 times as large"
    assert str(of(0.99998)) == "0.99998 times as large"
    assert str(of(1.00000004, -0.25)) == "1 times as large and 0.25 smaller"


def test_what_is_no_line_or_does_not_tell_is_not_found() -> None:
    old = values()
    noise = torch.randn(16, generator=torch.Generator().manual_seed(1))
    assert fitted(old, old.clamp(-0.5, 0.5)) is None
    assert fitted(old, old + noise) is None
    assert fitted(old, -old) is None
    assert fitted(old, old * 0) is None
    assert fitted(torch.zeros(16), old) is None
    assert fitted(torch.full((16,), 3.0), torch.full((16,), 6.0)) is None
    assert fitted(old[:3], old[:3] * 2) is None
    assert fitted(old, old * math.inf) is None


def test_a_capture_is_noticed_on_devices_that_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    assert not edits_by_hand._is_capturing(device)
    module = torch.get_device_module(device)
    monkeypatch.setattr(module, "is_current_stream_capturing", lambda: True, raising=False)
    assert edits_by_hand._is_capturing(device)


def of(factor: float, offset: float = 0) -> Edit:
    return Edit(factor, offset, 1e-3)


def test_edits_of_two_ranks_differ_in_what_they_share_or_did_to_all() -> None:
    assert difference({"a": of(0.5)}, {"a": of(0.5001)}) is None
    assert difference({"a": of(0.5)}, {"a": of(0.6)}) == ("a", of(0.5), of(0.6))
    assert difference({"a": of(1)}, {"a": of(0.6)}) == ("a", of(1), of(0.6))
    assert difference({"a": of(1, 3)}, {"a": of(1, 4)}) == ("a", of(1, 3), of(1, 4))
    assert difference({"a": of(1, 3)}, {"a": of(1)}) is None  # Too small to be told from zero.
    both = {"a": of(0.5), "b": of(0.5)}
    assert difference(both, {"c": of(0.6), "d": of(0.6)}) == (None, of(0.5), of(0.6))
    # Not all gradients of a rank, or none: as where a program scales those of one layer.
    assert difference(both, {"c": of(0.6), "d": of(0.7)}) is None
    assert difference(both, {"c": of(1), "d": of(1)}) is None
    assert difference({"a": of(0.5)}, {"b": of(0.6)}) is None
    assert difference(both, {}) is None
