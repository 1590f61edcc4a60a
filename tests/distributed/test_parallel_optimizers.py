"""Optimizers of whole tensors and native ones over a mesh: tensor-parallel parameters, and experts
on some ranks only."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Muon

from layerzero import ZeRO3
from layerzero.optim import AdamW, WholeTensorOptimizer
from tests.distributed import test_experts as experts
from tests.distributed import test_tensor_parallel as tensor_parallel
from tests.distributed.test_tensor_parallel import Llama
from tests.harness.checks import assert_bitwise, assert_same_parameters
from tests.harness.ranks import on_ranks, run_ranks
from tests.harness.reference import full_parameters, seeded
from tests.harness.whole_optimizers import Shampoo


def _piece(whole: Tensor, sharded: nn.Parameter) -> Tensor:
    """This rank's part of a gradient."""
    info = sharded.layerzero
    if info.tensor_parallel is not None:
        ends = zip(info.tensor_parallel.offset, info.tensor_parallel.local_shape, strict=True)
        whole = whole[tuple(slice(at, at + size) for at, size in ends)]
    return whole.reshape(-1)[slice(*info.range)].clone()


def _train(num_data_parallel: int, arguments: dict[str, Any]) -> None:
    for cls, options, takes in (
        (Shampoo, {}, (0, 1, 2)),
        (Muon, {"lr": 0.02}, (2,)),
    ):
        mesh = tensor_parallel.grid(num_data_parallel)
        model, plain = tensor_parallel.wrapped(mesh, **arguments), seeded(Llama)
        optimizer = WholeTensorOptimizer(
            [p for p in model.parameters() if p.layerzero.ndim in takes],
            cls,
            bucket_bytes=500,
            **options,
        )
        expected = cls([p for p in plain.parameters() if p.ndim in takes], **options)
        owned = [None] * dist.get_world_size()
        dist.all_gather_object(owned, sorted(optimizer.owned))
        names = [name for each in owned for name in each]
        assert len(names) == len(set(names)) == len(expected.param_groups[0]["params"])
        for step in range(3):
            draw = torch.Generator().manual_seed(step)
            for sharded, own in zip(model.parameters(), plain.parameters(), strict=True):
                own.grad = torch.randn(own.shape, generator=draw)
                sharded.grad = _piece(own.grad, sharded)
            optimizer.step()
            expected.step()
            optimizer.zero_grad()
            if step == 1:
                with torch.no_grad():
                    for parameter in (*model.parameters(), *plain.parameters()):
                        parameter.mul_(0.5)
        assert_same_parameters(full_parameters(model), full_parameters(plain), what=cls.__name__)


def _train_all(settings: list[tuple[int, dict[str, Any]]]) -> None:
    for num_data_parallel, arguments in settings:
        _train(num_data_parallel, arguments)


def test_tensor_parallel_parameters_are_whole_over_the_mesh() -> None:
    run_ranks(2, _train_all, [(1, {})])
    copied = {"zero3_size": 1, "outer": "replicate"}
    run_ranks(4, _train_all, [(2, {}), (2, {"zero3_size": 1}), (2, copied)])


def _train_experts(kind: type[nn.Module], ep: int, arguments: dict[str, Any]) -> None:
    model, plain = experts.wrapped(ep, kind, **arguments), seeded(lambda: experts.Model(kind))
    optimizer = WholeTensorOptimizer(model.parameters(), Shampoo, bucket_bytes=300)
    expected = Shampoo(plain.parameters())
    gradients = dict(plain.named_parameters())
    for step in range(4):
        draw = torch.Generator().manual_seed(step)
        for own in gradients.values():
            own.grad = torch.randn(own.shape, generator=draw)
        for name, sharded in model.named_parameters():
            sharded.grad = _piece(gradients[name].grad, sharded)
        optimizer.step()
        expected.step()
    values = full_parameters(model)
    assert all(torch.equal(value, gradients[name]) for name, value in values.items())
    sizes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(sizes, sum(p.numel() for p in optimizer.owned.values()))
    assert sum(sizes) == sum(p.numel() for p in plain.parameters())
    assert max(sizes) <= 1.25 * sum(sizes) / len(sizes)  # A few tensors, each on one rank.


@on_ranks(4)
def test_experts_on_some_ranks() -> None:
    for name in ("ep 2", "ep 4, experts not sharded", "layered", "all replicated outside"):
        ep, arguments = experts.SETTINGS[name]
        for kind in (experts.NamedExperts, experts.StackedExperts):
            if kind is experts.NamedExperts or "replicates_experts" not in arguments:
                _train_experts(kind, ep, arguments)


def _steps(model: ZeRO3, plain: nn.Module) -> dict[str, Tensor]:
    """The whole weights after steps with gradients that are the same at every world size."""
    optimizer, whole = (
        AdamW(model.parameters(), lr=1e-2, state="bfloat16"),
        plain.named_parameters(),
    )
    shapes = {name: p.shape for name, p in whole}
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
