"""Optimizers of whole tensors and native ones over a mesh: tensor-parallel parameters, and experts
on some ranks only."""

from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Muon

from layerzero import ZeRO3
from layerzero.optim import AdamW, WholeTensorOptimizer
from tests.distributed import test_experts as experts
from tests.distributed import test_tensor_parallel as tensor_parallel
from tests.distributed.test_tensor_parallel import Llama
from tests.harness.checks import assert_bitwise, assert_same_parameters
from tests.harness.ranks import of_all_ranks, on_ranks, run_ranks
from tests.harness.reference import full_parameters, seeded
from tests.harness.whole_optimizers import Shampoo


def _piece(whole: Tensor, sharded: nn.Parameter) -> Tensor:
    """This rank's part of a gradient."""
    info = sharded.layerzero
    if info.tensor_parallel is not None:
        ends = zip(info.tensor_parallel.offset, info.tensor_parallel.local_shape, strict=True)
        whole = whole[tuple(slice(at, at + size) for at, size in ends)]
    return whole.reshape(-1)[slice(*info.range)].clone()


def _assert_follows(
    model: ZeRO3, plain: nn.Module, kind: Any, takes: Any = (0, 1, 2, 3), **options: Any
) -> list[dict[str, int]]:
    """Steps on parameters of some numbers of dimensions, bitwise as on whole ones. Returns which
    of them each rank owns, and their elements."""
    own, twins = dict(model.named_parameters()), dict(plain.named_parameters())
    chosen = [parameter for parameter in own.values() if parameter.layerzero.ndim in takes]
    optimizer = WholeTensorOptimizer(chosen, kind, **options)
    options.pop("bucket_bytes")
    expected = kind([twin for twin in twins.values() if twin.ndim in takes], **options)
    for step in range(4):
        draw = torch.Generator().manual_seed(step)
        for twin in twins.values():
            twin.grad = torch.randn(twin.shape, generator=draw)
        for name, parameter in own.items():
            parameter.grad = _piece(twins[name].grad, parameter)
        for each in (optimizer, expected):
            each.step()
        if step == 1:
            with torch.no_grad():
                for parameter in (*own.values(), *twins.values()):
                    parameter.mul_(0.5)
    values = full_parameters(model)
    assert_same_parameters(values, {name: twins[name].detach() for name in values})
    return of_all_ranks({name: each.numel() for name, each in optimizer.owned.items()})


@pytest.mark.parametrize("world_size", [2, 4])
@on_ranks()
def test_tensor_parallel_parameters_are_whole_over_the_mesh(world_size: int) -> None:
    settings = [{}, {"zero3_size": 1}, {"zero3_size": 1, "outer": "replicate"}]
    for arguments in settings if world_size == 4 else settings[:1]:
        for kind, takes, options in ((Shampoo, (0, 1, 2), {}), (Muon, (2,), {"lr": 0.02})):
            model = tensor_parallel.wrapped(tensor_parallel.grid(world_size // 2), **arguments)
            plain = seeded(Llama)
            owned = _assert_follows(model, plain, kind, takes, bucket_bytes=500, **options)
            names = {name for name, p in plain.named_parameters() if p.ndim in takes}
            assert sorted(chain(*owned)) == sorted(names), "each has one owner"


@on_ranks(4)
def test_experts_on_some_ranks() -> None:
    for name in ("ep 2", "ep 4, experts not sharded", "layered", "all replicated outside"):
        ep, arguments = experts.SETTINGS[name]
        for kind in (experts.NamedExperts, experts.StackedExperts):
            if kind is experts.StackedExperts and "replicates_experts" in arguments:
                continue
            model, plain = (
                experts.wrapped(ep, kind, **arguments),
                seeded(partial(experts.Model, kind)),
            )
            owned = _assert_follows(model, plain, Shampoo, bucket_bytes=300)
            sizes = [sum(each.values()) for each in owned]
            assert sum(sizes) == sum(p.numel() for p in plain.parameters())
            assert max(sizes) <= 1.25 * sum(sizes) / len(sizes)  # A few tensors, each on one rank.


def _steps(model: ZeRO3, plain: nn.Module) -> dict[str, Tensor]:
    """The whole weights after steps with gradients that are the same at every world size."""
    optimizer = AdamW(model.parameters(), lr=1e-2, state="bfloat16")
    shapes = {name: p.shape for name, p in plain.named_parameters()}
    for step in range(4):
        draw = torch.Generator().manual_seed(step)
        drawn = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
        for name, parameter in model.named_parameters():
            parameter.grad = _piece(drawn[name], parameter)
        optimizer.step()
        optimizer.zero_grad()
    return full_parameters(model)


def _weights(num_data: int) -> list[dict[str, Tensor]]:
    """After steps that round by where an element is in its whole parameter; experts last."""
    found = []
    for arguments in ({}, {"zero3_size": 1})[:num_data]:
        model = tensor_parallel.wrapped(tensor_parallel.grid(num_data), **arguments)
        found.append(_steps(model, seeded(Llama)))
    return [*found, _steps(experts.wrapped(2), seeded(experts.Model))]


@pytest.mark.slow
def test_native_optimizers_have_the_same_bits_at_every_number_of_data_parallel_ranks() -> None:
    expected: dict[tuple[bool, str], Tensor] = {}
    for num_data in (1, 2):
        for *dense, of_experts in run_ranks(2 * num_data, _weights, num_data):
            for values in (*dense, of_experts):
                for name, value in values.items():
                    key = values is of_experts, name
                    assert_bitwise(value, expected.setdefault(key, value), str(key))
    assert len(expected) > 20
