"""Reductions that the engine sums: their bits, and what they hold; see Note [Parts arrive where
others have left] in comm/gloo/messages.py."""

from __future__ import annotations

import functools
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from layerzero import ZeRO3
from layerzero.comm.collectives import reduce_scatter
from layerzero.comm.pending import Operation
from layerzero.flat.groups import ShardGroup, make_shard_group
from layerzero.memory_budget.storages import StorageCount
from layerzero.ops import ordered_sum_
from tests.harness.models import WIDTH, Block, Mlp
from tests.harness.ranks import run_ranks

NUMEL = 1001
LIMIT = timedelta(minutes=2)
PARTS = {2: 1, 3: 2, 4: 2, 6: 3, 9: 4}
"""Group size -> parts of memory that a reduction gets beside its input."""


def world() -> ShardGroup:
    assert dist.group.WORLD is not None
    return make_shard_group(dist.group.WORLD, torch.device("cpu"), LIMIT)


def chunks_of(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """[size * NUMEL]; sums of them depend on the order."""
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(size * NUMEL, generator=generator) * 10.0 ** (3 * (rank % 3))
    return values.to(dtype)


def _sums_of_some_orders() -> None:
    group = world()
    size = group.size
    rising, falling = list(range(size)), list(range(size))[::-1]
    number = 0
    for dtype in (torch.float32, torch.bfloat16, torch.complex64):
        for order in (None, falling):
            number += 1
            operation = Operation("reduce-scatter", "a unit", number)
            given = chunks_of(group.rank, size, dtype)
            summed, pending = reduce_scatter(given, group, operation, 1 / size, order=order)
            pending.wait()
            place = (order or rising)[group.rank]
            parts = [chunks_of(rank, size, dtype).chunk(size)[place] for rank in range(size)]
            wanted = ordered_sum_(torch.empty_like(summed), parts, 1 / size)
            assert torch.equal(summed, wanted), (dtype, order)


@pytest.mark.parametrize("size", PARTS)
def test_sums_have_the_bits_of_a_sum_in_rank_order(size: int) -> None:
    run_ranks(size, _sums_of_some_orders)


def _counted() -> None:
    group = world()
    count = StorageCount()
    with count.watching():
        given = torch.zeros(group.size * NUMEL)
        operation = Operation("reduce-scatter", "a unit", 1)
        summed, pending = reduce_scatter(given, group, operation)
        pending.wait()
        del given
        held = summed.numel()
        assert held == summed.untyped_storage().nbytes() // 4, "no view keeps the input alive"
    assert count.peak == 4 * NUMEL * (group.size + PARTS[group.size])


@pytest.mark.parametrize("size", PARTS)
def test_a_reduction_holds_one_and_a_half_inputs(size: int) -> None:
    run_ranks(size, _counted)


def _two_in_flight() -> None:
    group = world()
    make = functools.partial(Operation, "reduce-scatter", "a unit")
    values = [torch.full((group.size * NUMEL,), float(k + group.rank)) for k in range(2)]
    started = [reduce_scatter(each, group, make(k)) for k, each in enumerate(values)]
    for _, pending in started:
        pending.wait()
    for k, (summed, pending) in enumerate(started):
        assert pending.is_done
        assert torch.equal(summed, torch.full_like(summed, sum(range(k, k + group.size))))


def test_two_reductions_in_flight_do_not_mix() -> None:
    run_ranks(6, _two_in_flight)


class _Fails(torch.autograd.Function):
    """Raises in backward on one rank."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        raise ValueError("a bad batch")


def _fail(module: torch.nn.Module, args: object, out: torch.Tensor) -> torch.Tensor:
    return _Fails.apply(out)


def _fails_on_all() -> None:
    torch.manual_seed(0)
    model = ZeRO3(Mlp(4), auto_wrap_policy={Block})
    batch = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model(batch).sum().backward()
        return [each.grad.clone() for each in model.parameters() if each.grad is not None]

    expected = gradients()
    model.zero_grad()
    hook = model.blocks[1].register_forward_hook(_fail)
    with pytest.raises(ValueError, match="a bad batch"):
        model(batch).sum().backward()
    hook.remove()
    assert all(each.grad is None for each in model.parameters())
    for mine, other in zip(gradients(), expected, strict=True):
        assert torch.equal(mine, other)


def test_a_pass_that_fails_on_four_ranks_leaves_no_message_over() -> None:
    run_ranks(4, _fails_on_all)
