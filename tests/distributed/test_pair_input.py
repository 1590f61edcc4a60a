"""Reductions between two ranks; see Note [Two ranks keep the own chunk apart] in
flat/pair_input.py."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from layerzero import MixedPrecision, ZeRO3
from layerzero.comm.ordered_sums import reduce_with_peer
from layerzero.comm.pending import Operation
from layerzero.flat import pair_input
from layerzero.flat.groups import make_shard_group
from layerzero.flat.layout import FlatLayout, GradientLayout
from layerzero.flat.pair_input import PairInput
from layerzero.memory_budget.storages import StorageCount
from layerzero.optim import AdamW
from tests.harness.checks import assert_bitwise
from tests.harness.models import WIDTH, Block
from tests.harness.ranks import on_ranks
from tests.harness.recording import gradient_nbytes

_SMALL, _NEVER = 64, 1 << 62
"""Least bytes of a chunk that is kept apart: of every block's, and of none."""


class _Net(nn.Module):
    """Blocks of parameters that no chunk holds whole; one of them can be told to raise."""

    def __init__(self, freezes: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.raises = False
        if freezes:
            for block in self.blocks:
                block.get_submodule("down").requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index == 0 and x.requires_grad:
                x.register_hook(self._maybe_raise)
        return x

    def _maybe_raise(self, _: torch.Tensor) -> None:
        if self.raises:
            raise ValueError("told to")


@contextmanager
def _fills() -> Iterator[list[PairInput]]:
    """The inputs that are filled inside."""
    filled: list[PairInput] = []
    real = PairInput.fill

    def noted(self: PairInput, *args: Any) -> None:
        filled.append(self)
        real(self, *args)

    with mock.patch.object(PairInput, "fill", noted):
        yield filled


def _batch(seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * seed + dist.get_rank())
    return torch.randn(3, WIDTH, generator=generator, dtype=dtype)


def _wrapped(net: nn.Module, least: int, **options: Any) -> ZeRO3:
    with mock.patch.object(pair_input, "LEAST_NBYTES", least):
        return ZeRO3(net, auto_wrap_policy={Block}, **options)


def _trained(
    least: int,
    dtype: torch.dtype = torch.float32,
    freezes: bool = False,
    micro_batches: int = 1,
    max_norm: float | None = None,
    **options: Any,
) -> tuple[list[torch.Tensor], int]:
    """The parameters after three steps, with the number of inputs that were filled."""
    torch.manual_seed(0)
    model = _wrapped(_Net(freezes).to(dtype), least, **options)
    optimizer = AdamW(model.parameters(), lr=0.1)
    values: list[torch.Tensor] = []
    with _fills() as filled:
        for step in range(3):
            for number in range(micro_batches):
                is_last = number == micro_batches - 1
                with nullcontext() if is_last else model.no_sync():
                    model(_batch(10 * step + number, dtype)).square().sum().backward()
            if max_norm is not None:
                values.append(model.clip_grad_norm_(max_norm))
            values += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
    return [*values, *(p.detach().clone() for p in model.parameters())], len(filled)


_IN_SHARDS = {"accumulation": "sharded"}
_CASES: list[dict[str, Any]] = [
    {},
    {"dtype": torch.float64},
    {"freezes": True},
    {"max_norm": 0.1},
    {"deterministic": True},
    {"verify": "always"},
    {"reshard_after_forward": False, "max_norm": 0.1},
    {"micro_batches": 3, **_IN_SHARDS},
    {"micro_batches": 3, "freezes": True, "max_norm": 0.1, **_IN_SHARDS},
]


@on_ranks(2)
def test_gradients_norms_and_steps_have_the_bits_of_one_buffer() -> None:
    for case in _CASES:
        apart, num_filled = _trained(_SMALL, **case)
        in_one, num_others = _trained(_NEVER, **case)
        wanted_fills = 9 * case.get("micro_batches", 1)
        assert (num_filled, num_others) == (wanted_fills, 0), case
        assert len(apart) == len(in_one)
        for value, wanted in zip(apart, in_one, strict=True):
            assert_bitwise(value, wanted)


@on_ranks(2)
def test_a_reduction_holds_one_and_a_quarter_of_its_input() -> None:
    numel, rank = 1000, dist.get_rank()
    layout = FlatLayout.build([2 * numel], group_size=2, alignment=1)
    assert dist.group.WORLD is not None
    group = make_shard_group(dist.group.WORLD, torch.device("cpu"), timedelta(minutes=2))
    gradient = torch.arange(2.0 * numel) + rank
    count = StorageCount()
    with count.watching():
        chunks = GradientLayout.build(layout, [0])
        pair = PairInput(chunks, rank, torch.float32, torch.device("cpu"), {0: 0})
        pair.fill([gradient])
        taken = pair.take()
        assert taken is not None and pair.take() is None
        summed, pending = reduce_with_peer(*taken, group, Operation("reduce-scatter", "a unit", 1))
        pending.wait()
        pair.free()
        del taken
        assert (
            summed.untyped_storage().nbytes() == pair.memory.untyped_storage().nbytes() + 4 * numel
        )
    tables = sum(each.table.nbytes for each in pair.tables)
    assert count.peak - tables == 1.25 * gradient.nbytes
    assert count.live - tables == summed.nbytes
    assert torch.equal(summed, 2 * torch.arange(2.0 * numel).chunk(2)[rank] + 1)


@on_ranks(2)
def test_gradients_of_the_own_chunk_are_dropped_before_the_peers_are_packed() -> None:
    numel, rank, cpu = 1000, dist.get_rank(), torch.device("cpu")
    numels = [numel // 2, numel, numel // 2]  # The second one lies in both chunks.
    layout = FlatLayout.build(numels, group_size=2, alignment=1)
    chunks = GradientLayout.build(layout, range(3))
    for dtype in (torch.float32, torch.bfloat16):
        values = torch.arange(2.0 * numel).to(dtype)
        parts = values.split(numels)
        count = StorageCount()
        with count.watching():
            gradients = [part.clone() for part in parts]
            pair = PairInput(chunks, rank, torch.float32, cpu, {0: 0, 1: 1, 2: 2})
            count.restart()
            pair.fill(gradients)
            taken = pair.take()
        assert taken is not None
        assert torch.equal(torch.cat([taken.own, taken.sent]), values.float().roll(-rank * numel))
        # A quarter of the gradients was dropped before three quarters of the input were allocated.
        tables = sum(each.table.nbytes for each in pair.tables)
        held = 0.75 * values.nbytes + 1.25 * 4 * values.numel()
        assert count.peak - tables == held, (dtype, count.peak, held)
        pair.free()


@on_ranks(2)
def test_an_exception_while_both_halves_are_under_way_leaves_nothing() -> None:
    torch.manual_seed(0)
    net = _Net()
    model = _wrapped(net, _SMALL)
    optimizer = AdamW(model.parameters(), lr=0.1)
    with _fills() as filled:
        net.raises = True
        with pytest.raises(ValueError, match="told to"):
            model(_batch(1)).square().sum().backward()
        net.raises = False
        assert filled, "a reduction was under way"
        model(_batch(2)).square().sum().backward()
        optimizer.step()
    assert set(gradient_nbytes(model).values()) == {0}
    found = [p.detach().clone() for p in model.parameters()]
    torch.manual_seed(0)
    clean = _wrapped(_Net(), _NEVER)
    optimizer = AdamW(clean.parameters(), lr=0.1)
    clean(_batch(2)).square().sum().backward()
    optimizer.step()
    for value, wanted in zip(found, clean.parameters(), strict=True):
        assert_bitwise(value, wanted.detach())


@on_ranks(4)
def test_larger_groups_and_layers_of_them_pack_into_one_buffer() -> None:
    low = MixedPrecision(param_dtype=torch.bfloat16)
    cases: list[dict[str, Any]] = [{"zero3_size": 2}, {}, {"mixed_precision": low}]
    for case in cases:
        assert _trained(_SMALL, **case)[1] == 0, case


@on_ranks(2)
def test_low_precision_and_small_chunks_pack_into_one_buffer() -> None:
    low = MixedPrecision(param_dtype=torch.bfloat16)
    cases: list[dict[str, Any]] = [
        {"mixed_precision": low},
        {"zero3_size": 1},
        {"micro_batches": 3},  # They add up in one buffer.
    ]
    for case in cases:
        assert _trained(_SMALL, **case)[1] == 0, case
    # The sum in float32 is what the chunk is packed for, whatever backward computes in.
    wide = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    assert _trained(_SMALL, mixed_precision=wide)[1] == 9
    assert _trained(pair_input.LEAST_NBYTES)[1] == 0, "small chunks"
