"""Whole tensors over a mesh: tensor-parallel parameters, and experts on some ranks only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.optim import AdamW, Muon

from layerzero import ZeRO3
from layerzero.optim import WholeTensorOptimizer
from tests.harness.ranks import run_ranks
from tests.harness.reference import seeded
from tests.harness.whole_optimizers import Shampoo

WIDTH, HIDDEN = 6, 9  # 9 rows: the parts of two ranks are unequal


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x)))) * self.scale


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _parallel(num_data_parallel: int, **arguments: Any) -> ZeRO3:
    shape = (num_data_parallel, dist.get_world_size() // num_data_parallel)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    model = seeded(Model)
    for layer in model.layers:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(layer, mesh["tp"], plan)
    return ZeRO3(model, mesh["dp"], auto_wrap_policy={Layer}, **arguments)


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _train(num_data_parallel: int, arguments: dict[str, Any]) -> None:
    for cls, options, takes in (
        (Shampoo, {}, (0, 1, 2)),
        (Muon, {"lr": 0.02}, (2,)),
        (AdamW, {"lr": 0.01}, (0, 1, 2)),
    ):
        model, plain = _parallel(num_data_parallel, **arguments), seeded(Model)
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
        for step in range(4):
            draw = torch.Generator().manual_seed(step)
            model(torch.randn(3, WIDTH, generator=draw)).square().mean().backward()
            with model.summon_full_params(writeback=False, with_grads=True):
                for full, own in zip(model.parameters(), plain.parameters(), strict=True):
                    own.grad = _full(full.grad).clone()
            optimizer.step()
            expected.step()
            optimizer.zero_grad()
            if step == 1:
                with torch.no_grad():
                    for parameter in (*model.parameters(), *plain.parameters()):
                        parameter.mul_(0.5)
        with model.summon_full_params(writeback=False):
            for (name, full), own in zip(model.named_parameters(), plain.parameters(), strict=True):
                assert torch.equal(_full(full), own), f"{cls.__name__}: {name}"


@pytest.mark.parametrize(
    ("world_size", "num_data_parallel", "arguments"),
    [
        (2, 1, {}),
        (4, 2, {}),
        (4, 2, {"zero3_size": 1}),
        (4, 2, {"zero3_size": 1, "outer": "replicate"}),
    ],
    ids=["alone", "sharded", "zero1", "replicate"],
)
def test_tensor_parallel_parameters_are_whole_over_the_mesh(
    world_size: int, num_data_parallel: int, arguments: dict[str, Any]
) -> None:
    run_ranks(world_size, _train, num_data_parallel, arguments)
