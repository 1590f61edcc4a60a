"""Micro-batches add up: without communication until the last, or reduced one by one."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from layerzero import ZeRO3
from tests.harness.compare import (
    assert_same_gradients,
    assert_trains_alike,
    roundings_of,
    sharded,
    zero3,
)
from tests.harness.models import CASES, Block, Mlp
from tests.harness.ranks import run_ranks
from tests.harness.reference import (
    backward_of_all_ranks,
    batches_of,
    forward_backward,
    full_parameters,
    seeded,
)
from tests.harness.traffic import SentBytes

Micro = Sequence[Tensor]


def _no_sync(model: nn.Module, micro_batches: Micro) -> Tensor:
    losses = []
    with model.no_sync():  # type: ignore[operator]
        losses += [forward_backward(model, batch) for batch in micro_batches[:-1]]
    losses.append(forward_backward(model, micro_batches[-1]))
    return torch.stack(losses)


def _switched(model: nn.Module, micro_batches: Micro) -> Tensor:
    losses = []
    for index, batch in enumerate(micro_batches):
        is_last = index == len(micro_batches) - 1
        model.set_requires_gradient_sync(is_last)  # type: ignore[operator]
        losses.append(forward_backward(model, batch))
    return torch.stack(losses)


def _no_sync_each(model: nn.Module, micro_batches: Micro) -> Tensor:
    losses = []
    for batch in micro_batches[:-1]:
        with model.no_sync():  # type: ignore[operator]
            losses.append(forward_backward(model, batch))
    losses.append(forward_backward(model, micro_batches[-1]))
    return torch.stack(losses)


def _in_turn(model: nn.Module, micro_batches: Micro) -> Tensor:
    return torch.stack([forward_backward(model, batch) for batch in micro_batches])


UNSHARDED: dict[str, Callable[[nn.Module, Micro], Tensor]] = {
    "no_sync": _no_sync,
    "set_requires_gradient_sync": _switched,
    "no_sync for each": _no_sync_each,
}


def _micro_batches(name: str, steps: int, count: int, seed: int = 0) -> list[list[list[Any]]]:
    """[step][rank][micro-batch]"""
    each = batches_of(CASES[name], dist.get_world_size() * count, steps, seed)
    return [[step[i : i + count] for i in range(0, len(step), count)] for step in each]


_NAMES = ["mlp", "transformer", "tied_across_units", "unused_parts", "frozen_parts", "odd_shapes"]


def _train(how: str, names: list[str], options: dict) -> None:
    world_size = dist.get_world_size()
    for name in names:
        case = CASES[name]
        # Each rank adds up its own micro-batches first, as the reference does: bitwise on two.
        try:
            assert_trains_alike(
                sharded(case, **options),
                seeded(case.build),
                _micro_batches(name, steps=3, count=3),
                run=UNSHARDED[how],
                reference_run=_in_turn,
                roundings=roundings_of(world_size, case),
            )
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("how", UNSHARDED)
def test_micro_batches_add_up_unsharded_bitwise(how: str, world_size: int) -> None:
    run_ranks(world_size, _train, how, _NAMES, {})


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"accumulation": "unsharded"}, id="unsharded"),
        pytest.param({"gradient_reduction": "mean", "reshard_after_forward": False}, id="kept"),
        pytest.param({"auto_wrap_policy": None}, id="one unit"),
    ],
)
def test_accumulation_goes_with_other_options(options: dict) -> None:
    run_ranks(2, _train, "no_sync", ["mlp", "transformer"], options)


def _with_sync_on() -> None:
    """Every backward is reduced; the reduced gradients add up in `.grad`."""
    for name in _NAMES:
        case = CASES[name]
        model, plain = sharded(case), seeded(case.build)
        roundings = roundings_of(dist.get_world_size(), case)
        for seed in range(2):
            model.zero_grad()
            plain.zero_grad()
            for step in batches_of(case, dist.get_world_size(), steps=3, seed=seed):
                forward_backward(model, step[dist.get_rank()])
                backward_of_all_ranks(plain, step)
                assert_same_gradients(model, plain, roundings, f"{name}: gradient of")


@pytest.mark.parametrize("world_size", [2, 3])
def test_with_sync_on_reduced_gradients_add_up(world_size: int) -> None:
    run_ranks(world_size, _with_sync_on)


def _mixed() -> None:
    """Some reduced, some not, in one step."""
    case = CASES["mlp"]
    model, plain = sharded(case), seeded(case.build)
    steps = batches_of(case, dist.get_world_size(), steps=6)
    for index, step in enumerate(steps):
        model.set_requires_gradient_sync(index % 3 != 1)
        forward_backward(model, step[dist.get_rank()])
        backward_of_all_ranks(plain, step)
    assert_same_gradients(model, plain, roundings=64)


def test_reduced_and_unreduced_micro_batches_may_mix() -> None:
    run_ranks(2, _mixed)


def _used_in_one_micro_batch_only() -> None:
    """A gradient of an earlier micro-batch is reduced although the last one brings none."""
    case = CASES["branches"]
    model, plain = sharded(case), seeded(case.build)
    rows = batches_of(CASES["mlp"], 2 * dist.get_world_size(), steps=1)[0]
    paths = ([0, 1, 2], [1])
    step = [
        [(rows[2 * rank + index], path) for index, path in enumerate(paths)]
        for rank in range(dist.get_world_size())
    ]
    for how in UNSHARDED.values():
        model.zero_grad()
        plain.zero_grad()
        how(model, step[dist.get_rank()])
        backward_of_all_ranks(plain, step, _in_turn)
        assert_same_gradients(model, plain)


def test_what_only_an_earlier_micro_batch_used_is_reduced_too() -> None:
    run_ranks(2, _used_in_one_micro_batch_only)


def _bytes_of_a_micro_batch(sync: bool) -> int:
    model = ZeRO3(nn.Sequential(*(Block(64 + 1, 64) for _ in range(3))), auto_wrap_policy={Block})
    batch = torch.randn(2, 65)
    forward_backward(model, batch)
    model.set_requires_gradient_sync(sync)
    sent = SentBytes()
    with sent:
        forward_backward(model, batch)
    return sent.nbytes


def _no_gradient_bytes() -> None:
    gradients = sum(4 * parameter.numel() for parameter in Block(65, 64).parameters()) * 3
    with_sync, without = _bytes_of_a_micro_batch(True), _bytes_of_a_micro_batch(False)
    saved = with_sync - without
    assert 0.98 * gradients / 2 <= saved, f"{saved} bytes saved, of {gradients} of gradients"


def test_no_gradient_bytes_travel_in_no_sync() -> None:
    run_ranks(2, _no_gradient_bytes)


def _sum_of_ranks() -> None:
    model, plain = zero3(Mlp, Block, gradient_reduction="sum"), seeded(Mlp)
    assert_trains_alike(
        model,
        plain,
        _micro_batches("mlp", steps=2, count=3),
        run=_no_sync,
        reference_run=_in_turn,
        reduction="sum",
    )


def test_a_summed_reduction_sums_micro_batches_and_ranks() -> None:
    run_ranks(2, _sum_of_ranks)


def _eval_between() -> None:
    case = CASES["mlp"]
    model, plain = sharded(case), seeded(case.build)
    step = _micro_batches("mlp", steps=1, count=2)[0]
    own = step[dist.get_rank()]
    with model.no_sync():
        forward_backward(model, own[0])
    with torch.no_grad():
        model(own[0])
    before = full_parameters(model)
    forward_backward(model, own[1])
    backward_of_all_ranks(plain, step, _in_turn)
    assert_same_gradients(model, plain)
    for name, value in full_parameters(model).items():
        assert torch.equal(value, before[name]), name


def test_an_evaluation_may_come_between_micro_batches() -> None:
    run_ranks(2, _eval_between)
