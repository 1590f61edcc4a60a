"""The alpha-beta model of the benchmarks, against cases worked out by hand."""

from __future__ import annotations

import pytest

from benchmarks.alpha_beta import (
    Link,
    Links,
    Mode,
    Split,
    Workload,
    predict,
    resident_nbytes,
    through_all_links,
)

P, G = 1200.0, 2400.0
WORK = Workload(
    gathered_nbytes=P,
    regathered_nbytes=900.0,
    gradient_nbytes=G,
    num_units=4,
    forward_s=10.0,
    backward_s=20.0,
    optimizer_s=6.0,
)
SPLIT = Split(inner=2, outer=3)
FREE = Link(alpha_s=0.0, bandwidth=float("inf"))
NO_TIME = Links(FREE, FREE, FREE)


def test_a_collective_takes_its_messages_and_its_bytes() -> None:
    link = Link(alpha_s=0.5, bandwidth=100.0)
    assert link.time_s(ranks=4, sent_nbytes=300) == 0.5 * 3 + 3
    assert link.time_s(ranks=4, sent_nbytes=300, calls=10) == 0.5 * 3 * 10 + 3


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        # n = 2, K = 3, N = 6, g P = 2100: the table of docs/reference/layered.md.
        ("zero1", {"inner": (2100 + G) / 2, "outer": (P + G) / 2 * 2 / 3, "all": 0}),
        ("replicate", {"inner": (2100 + G) / 2, "outer": 2 * G / 2 * 2 / 3, "all": 0}),
        ("shard", {"inner": 0, "outer": 0, "all": (2100 + G) * 5 / 6}),
    ],
    ids=["zero1", "replicate", "shard"],
)
def test_bytes_are_those_of_the_formulas(mode: Mode, expected: dict[str, float]) -> None:
    assert predict(mode, WORK, SPLIT, NO_TIME).sent_nbytes == pytest.approx(expected)


def test_without_a_shard_group_only_the_outer_group_carries_bytes() -> None:
    sent = predict("zero1", WORK, Split(inner=1, outer=4), NO_TIME).sent_nbytes
    assert sent == {"inner": 0, "outer": (P + G) * 3 / 4, "all": 0}


def test_one_shard_group_of_all_ranks_is_one_hop_in_every_mode() -> None:
    link = Link(alpha_s=0.25, bandwidth=50.0)
    split = Split(inner=4, outer=1)
    steps = {
        predict(mode, WORK, split, Links(link, FREE, link)).step_s
        for mode in ("zero1", "replicate", "shard")
    }
    assert len(steps) == 1


def test_what_is_hidden_takes_no_time_and_the_optimizer_is_split() -> None:
    prediction = predict("zero1", WORK, SPLIT, NO_TIME)
    assert prediction.step_s == prediction.serial_s == 10 + 20 + 6 / 6
    assert prediction.communication_s == 0
    assert predict("replicate", WORK, SPLIT, NO_TIME).step_s == 10 + 20 + 6 / 2


def test_a_phase_takes_the_longer_of_compute_and_communication() -> None:
    links = Links(
        inner=Link(alpha_s=0.0, bandwidth=100.0),
        outer=Link(alpha_s=1.0, bandwidth=10.0),
        all=FREE,
    )
    # Forward: 600 bytes inside; 400 outside in 4 collectives of 2 messages.
    forward_s = 6 + (40 + 8)
    # Backward: 450 + 1200 bytes inside; 800 outside in 4 collectives.
    backward_s = 16.5 + (80 + 8)
    prediction = predict("zero1", WORK, SPLIT, links)
    assert prediction.communication_s == pytest.approx(forward_s + backward_s)
    assert prediction.step_s == pytest.approx(forward_s + backward_s + 1)
    assert prediction.serial_s == pytest.approx(forward_s + backward_s + 30 + 1)
    # An all-reduce in two halves, and nothing outside in the forward, which is hidden.
    prediction = predict("replicate", WORK, SPLIT, links)
    assert prediction.step_s == pytest.approx(10 + (16.5 + 160 + 16) + 3)


def test_a_model_of_equal_units_computes_six_operations_a_parameter_and_token() -> None:
    work = Workload.of_model(
        num_parameters=1e9, num_tokens=1000, flops=1e12, num_units=10, gradient_itemsize=4
    )
    assert (work.gathered_nbytes, work.gradient_nbytes) == (2e9, 4e9)
    assert work.regathered_nbytes == pytest.approx(1.8e9)
    assert (work.forward_s, work.backward_s) == pytest.approx((2, 4))


def test_rings_through_all_links_of_a_node_add_their_bandwidths() -> None:
    inner, outer = Link(alpha_s=1.0, bandwidth=300.0), Link(alpha_s=5.0, bandwidth=50.0)
    assert through_all_links(inner, outer, 4) == Link(alpha_s=2.0, bandwidth=200.0)
    assert through_all_links(inner, outer, 8) == Link(alpha_s=1.5, bandwidth=300.0)
    assert through_all_links(inner, outer, 1) == outer


@pytest.mark.parametrize(
    ("mode", "casts", "expected"),
    [
        ("zero1", False, 4 * 240 / 6 + 120 / 2),
        ("zero1", True, 4 * 240 / 6 + 120 / 2),
        ("replicate", False, 4 * 240 / 2),
        ("replicate", True, 4 * 240 / 2 + 120 / 2),
        ("shard", False, 4 * 240 / 6),
        ("shard", True, 4 * 240 / 6 + 120 / 6),
    ],
)
def test_resident_bytes_are_those_of_the_table(mode: Mode, casts: bool, expected: float) -> None:
    assert resident_nbytes(mode, SPLIT, 240, 120, casts) == expected
