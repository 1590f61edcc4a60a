"""When units are gathered, in plain Python: recorded orders, allowed states, the gather budget."""

import itertools
import math
from typing import Any

import pytest

from layerzero.config import GatherBudget, parse_nbytes
from tests.harness.internals import (
    MAX_AGE,
    MAX_KINDS,
    ExecOrderRecorder,
    ShardState,
    TrainingState,
    check_transition,
)


def run(recorder: ExecOrderRecorder, kind: object, order: list[int], depth: int = 1) -> list:
    """Visit `order`; what was predicted after each visit."""
    recorder.begin(kind)
    predictions = []
    for unit in order:
        recorder.visit(unit)
        predictions.append(recorder.predict(depth))
    recorder.end()
    return predictions


def test_an_odd_pass_stops_counting_after_a_while() -> None:
    recorder = ExecOrderRecorder()
    run(recorder, "train", [0, 2, 1])
    for _ in range(MAX_AGE):
        assert run(recorder, "train", [0, 1, 2])[0] != [1]
    assert run(recorder, "train", [0, 1, 2])[0] == [1]
    assert recorder.orders("train") == [(0, 1, 2)]


def test_an_aborted_pass_leaves_no_trace() -> None:
    recorder = ExecOrderRecorder()
    run(recorder, "train", [0, 1])
    recorder.begin("train")
    recorder.visit(1)
    recorder.abort()
    assert not recorder.is_recording
    assert recorder.orders("train") == [(0, 1)]


def test_the_least_recent_kind_makes_room() -> None:
    recorder = ExecOrderRecorder()
    kinds = range(MAX_KINDS)
    for kind in (*kinds, 0, MAX_KINDS):
        run(recorder, kind, [0])
    assert recorder.orders(1) == []
    assert all(recorder.orders(kind) == [(0,)] for kind in (0, *kinds[2:], MAX_KINDS))


def test_a_transition_is_checked() -> None:
    for states in (ShardState, TrainingState):
        for current, new in itertools.product(states, repeat=2):
            if new in current.successors:
                check_transition("layers.3", current, new)
                continue
            with pytest.raises(RuntimeError, match=r"layers\.3") as caught:
                check_transition("layers.3", current, new)
            assert current.name in str(caught.value)
            assert new.name in str(caught.value)


def test_sizes_are_read_and_have_a_least() -> None:
    texts = ["1B", "512MB", "1.5 GiB", "2gb", "3KiB"]
    sizes = [1, 512_000_000, 3 << 29, 2 * 10**9, 3072]
    assert [parse_nbytes(text, "size") for text in texts] == sizes
    others: list[Any] = ["", "GB", "12", "-1MB", "1 parsec", None, True, math.inf, math.nan, [1]]
    for value in others:
        with pytest.raises(ValueError, match=r"size: expected a size such as '512MB' or '2GiB', g"):
            parse_nbytes(value, "size")
    assert [parse_nbytes(value, "size", least=12) for value in (12, 64e6)] == [12, 64_000_000]
    for value in (11, "0MB", -1):
        with pytest.raises(ValueError, match=f"size: expected at least 12 B, got {value!r}"):
            parse_nbytes(value, "size", least=12)


def test_the_budget_is_read() -> None:
    for value, expected in (
        (False, GatherBudget()),
        (True, GatherBudget(max_units=3)),
        (5, GatherBudget(max_units=5)),
        ("2GB", GatherBudget(max_nbytes=2 * 10**9)),
    ):
        assert GatherBudget.parse(value, default_units=3) == expected
