"""The simulator of the benchmarks, against cases worked out by hand."""

from __future__ import annotations

import pytest

from benchmarks.simulator import (
    Await,
    Compute,
    Link,
    Machines,
    MessageCosts,
    Post,
    Program,
    Result,
    Signal,
    Wait,
    simulate,
)
from tests.harness.checks import of_floats

FREE = Link(latency_s=0.0)


def machine(cores: float, ranks: int = 64, inside: Link = FREE, between: Link = FREE) -> Machines:
    return Machines(ranks, cores, inside, between)


def swap(rank: int, peer: int, nbytes: int, name: str = "swap") -> Post:
    ranks = (min(rank, peer), max(rank, peer))
    return Post(name, ranks, {peer: nbytes}, {peer: nbytes})


def ring(nbytes: int, ranks: tuple[int, ...], name: str = "ring") -> list[Post | Wait]:
    """A rank sends `nbytes` in all."""
    return [Post(name, ranks, {1: nbytes}, {1: nbytes}), Wait(name, ranks)]


def on_cores(cores: float, *seconds: float) -> Result:
    return simulate({0: {str(i): [Compute(s)] for i, s in enumerate(seconds)}}, machine(cores))


def end_of(result: Result) -> dict[str, float]:
    return {name: of_floats(end) for (_, name), end in result.ends.items()}


def test_threads_share_one_core_evenly() -> None:
    # Three run at a third until 3; two at half until 7; the last one alone until 9.
    assert end_of(on_cores(1, 1, 3, 5)) == {"0": 3, "1": 7, "2": 9}


def test_threads_share_two_cores_and_none_uses_more_than_one() -> None:
    # Three run at two thirds until 1.5; then each has a core.
    assert end_of(on_cores(2, 1, 3, 5)) == {"0": 1.5, "1": 3.5, "2": 5.5}
    assert on_cores(8, 1, 3, 5).step_s == 5


def test_cores_belong_to_a_machine() -> None:
    work: Program = {"main": [Compute(4)]}
    assert simulate({0: work, 1: work}, machine(1, ranks=1)).step_s == 4
    assert simulate({0: work, 1: work}, machine(1, ranks=2)).step_s == 8


def test_a_job_that_comes_later_slows_down_the_first() -> None:
    late: Program = {
        "first": [Compute(4)],
        "second": [Compute(1), Signal("go"), Compute(1)],
        "third": [Await("go"), Compute(2)],
    }
    # Halves until 2 (first has 3 left), thirds until 5 (2 and 1 left), halves until 7.
    result = simulate({0: late}, machine(1))
    assert end_of(result) == {"second": 5, "third": 7, "first": 8}
    assert result.core_s == of_floats(8)


def test_a_collective_waits_for_the_last_rank() -> None:
    link = Link(latency_s=0.5, bandwidth=100)
    programs = {
        rank: {"main": [Compute(seconds), *ring(200, (0, 1, 2))]}
        for rank, seconds in enumerate((1.0, 7.0, 2.0))
    }
    assert simulate(programs, machine(3, inside=link)).step_s == of_floats(7 + 2 * 0.5 + 2)


def test_one_of_several_alike_is_enough() -> None:
    link = Link(latency_s=0.25, bandwidth=100)
    program: Program = {"main": [Compute(3), *ring(300, (0, 1, 2, 3))]}
    all_of_them = simulate(dict.fromkeys(range(4), program), machine(4, inside=link))
    assert simulate({0: program}, machine(1, inside=link)).step_s == all_of_them.step_s


def test_a_collective_overlaps_with_compute_as_the_alpha_beta_formula_says() -> None:
    """step = max(compute, (k - 1) latency + bytes / bandwidth)."""
    link = Link(latency_s=0.5, bandwidth=100)
    for compute_s, expected in ((2.0, 3 * 0.5 + 6.0), (20.0, 20.0)):
        post, wait = ring(600, (0, 1, 2, 3))
        result = simulate({0: {"main": [post, Compute(compute_s), wait]}}, machine(1, inside=link))
        assert result.step_s == of_floats(expected)


def test_collectives_at_once_share_a_link_and_not_two_links() -> None:
    slow, fast = Link(latency_s=0.0, bandwidth=10), Link(latency_s=0.0, bandwidth=20)
    two: Program = {"a": ring(100, (0, 1)), "b": ring(100, (0, 2))}
    same = simulate({0: two}, machine(1, inside=slow))
    assert end_of(same) == {"a": 20, "b": 20}
    apart = simulate({0: two}, machine(1, ranks=2, inside=slow, between=fast))
    assert end_of(apart) == {"a": 10, "b": 5}


def test_collectives_of_one_group_run_one_after_the_other() -> None:
    link = Link(latency_s=1.0, bandwidth=100)
    two: Program = {"a": ring(100, (0, 1), "a"), "b": ring(100, (0, 1), "b")}
    assert end_of(simulate({0: two}, machine(1, inside=link))) == {"a": 2, "b": 4}


def test_the_link_is_the_one_between_machines_if_the_group_spans_them() -> None:
    machines = machine(1, ranks=2, inside=Link(1.0), between=Link(5.0))
    inside: Program = {"main": ring(0, (0, 1))}
    across: Program = {"main": ring(0, (0, 1, 2))}
    assert simulate({0: inside}, machines).step_s == 1
    assert simulate({0: across}, machines).step_s == 2 * 5


def test_a_message_costs_both_sides_core_seconds() -> None:
    costs = MessageCosts(
        post_s=1, send_s=2, send_s_per_byte=0.5, receive_s=4, receive_s_per_byte=0.25
    )
    send: Program = {"main": [Post("m", (0, 1), {1: 8}, {}), Wait("m", (0, 1))]}
    receive: Program = {"main": [Post("m", (0, 1), {}, {0: 8}), Wait("m", (0, 1))]}
    result = simulate({0: send, 1: receive}, machine(16), costs)
    assert result.core_s == of_floats(2 * 1 + (2 + 4) + (4 + 2))
    # Each side works on its part while the other works on the next: 6, and the last quarter of 6.
    assert end_of(result)["main"] == result.ends[1, "main"] == of_floats(6 + 6 / 4)
    assert result.ends[0, "main"] == of_floats(6)


def test_messages_that_nothing_overlaps_with_fill_one_core() -> None:
    costs = MessageCosts(send_s_per_byte=0.5, receive_s_per_byte=0.5)
    programs: dict[int, Program] = {
        rank: {"main": [Compute(3), swap(rank, 1 - rank, 8), Wait("swap", (0, 1))]}
        for rank in (0, 1)
    }
    # Two ranks compute 3, send 4 and receive 4 each.
    assert simulate(programs, machine(1), costs).step_s == of_floats(22)
    assert simulate(programs, machine(2), costs).step_s == of_floats(11)


def test_a_message_starts_when_both_ends_have_posted_it() -> None:
    costs = MessageCosts(send_s=1)
    programs: dict[int, Program] = {
        0: {"main": [swap(0, 1, 0), Wait("swap", (0, 1))]},
        1: {"main": [Compute(5), swap(1, 0, 0), Wait("swap", (0, 1))]},
    }
    assert simulate(programs, machine(4), costs).ends[0, "main"] == of_floats(6)


def test_threads_that_wait_for_each_other_are_named() -> None:
    with pytest.raises(RuntimeError, match=r"wait forever: \[\(0, 'main'\)\]"):
        simulate({0: {"main": [Await("nothing")], "other": [Compute(1)]}}, machine(1))


def test_two_runs_are_equal() -> None:
    costs = MessageCosts(0.1, 0.2, 0.003, 0.1, 0.002)
    programs: dict[int, Program] = {
        rank: {
            "main": [
                *(swap(rank, rank ^ step, 100, f"{step}") for step in (1, 2, 3)),
                Compute(1 + rank / 3),
                *(Wait(f"{step}", tuple(sorted((rank, rank ^ step)))) for step in (1, 2, 3)),
            ]
        }
        for rank in range(4)
    }
    runs = [simulate(programs, machine(2), costs) for _ in range(2)]
    assert runs[0] == runs[1]
