"""`accumulation="auto"`: the cost model decides what docs/reference/layered.md says."""

import pytest

from layerzero.step.accumulation import AccumulationCosts, choose_sharded

MB = 10**6


def costs(group_size: int, ranks: int, sum_itemsize: int = 4, sent_itemsize: int = 4):
    """A model of 1 M parameters in float32, with Adam."""
    return AccumulationCosts(
        unsharded_nbytes=sum_itemsize * MB,
        sharded_nbytes=sum_itemsize * MB // group_size,
        sent_nbytes=sent_itemsize * MB * (group_size - 1) // group_size,
        state_nbytes=16 * MB // ranks,
    )


def test_a_small_group_has_room_for_all_gradients() -> None:
    is_sharded, reason = choose_sharded(costs(2, 2), 2, None)
    assert not is_sharded
    assert reason == (
        "unsharded, because accumulating 2 micro-batches unsharded takes 2 MB more memory and "
        "sends 2 MB less per step, and up to 8 MB are allowed (as shards and optimizer state)"
    )


def test_a_large_group_has_not() -> None:
    is_sharded, reason = choose_sharded(costs(8, 64), 8, None)
    assert is_sharded
    assert reason.startswith("sharded, because accumulating 8 micro-batches")
    assert "at most 0.25 MB are allowed" in reason


@pytest.mark.parametrize(("budget", "is_sharded"), [(3 * MB, True), (4 * MB, False)])
def test_a_byte_budget_decides_what_there_is_room_for(budget: int, is_sharded: bool) -> None:
    chosen, reason = choose_sharded(costs(8, 64), 8, budget)
    assert chosen is is_sharded
    assert "(limit_all_gathers)" in reason


def test_few_micro_batches_do_not_pay_for_wide_sums() -> None:
    """bfloat16 on the wire, float32 in memory: two micro-batches save half of what they keep."""
    assert choose_sharded(costs(2, 2, 4, 2), 2, None)[0]
    assert not choose_sharded(costs(2, 2, 4, 2), 3, None)[0]


def test_nothing_to_shard_stays_unsharded() -> None:
    assert choose_sharded(AccumulationCosts(0, 0, 0, 0), 4, 1) == (
        False,
        "unsharded, because the first hop shards nothing",
    )
