"""Ranks that start from other values are told; on request those of the first go to all."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from layerzero import ZeRO3
from layerzero.build.compare import device_digest, digest
from tests.harness.checks import assert_same_on_all_ranks
from tests.harness.compare import assert_same_values
from tests.harness.models import Block, Mlp
from tests.harness.ranks import KeptRanks, on_ranks
from tests.harness.reference import full_parameters, seeded


def _told(module: nn.Module, *args: Any, **options: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ZeRO3(module, *args, **options)
    assert all(each.filename == __file__ for each in caught), "it shows the caller's line"
    return [str(each.message) for each in caught]


def _changed(name: str, *ranks: int) -> nn.Module:
    """An Mlp with a buffer, where some ranks have one element of one tensor otherwise."""
    module = seeded(Mlp)
    module.blocks[1].register_buffer("order", torch.arange(6))
    if name and dist.get_rank() in ranks:
        tensor = dict(module.named_parameters()) | dict(module.named_buffers())
        tensor[name].data.view(-1)[-2:] = tensor[name].data.view(-1)[-2:].flip(0).clone()
    return module


def _other_values() -> dict[str, list[str]]:
    rank = dist.get_rank()
    told = {"equal": _told(_changed("", 0, 1, 2), auto_wrap_policy={Block})}
    torch.manual_seed(rank)
    told["seeds"] = _told(Mlp(), auto_wrap_policy={Block})
    told["element"] = _told(_changed("blocks.1.up.bias", 2), auto_wrap_policy={Block})
    told["first rank"] = _told(_changed("head.weight", 0), zero3_size=1, outer="replicate")
    told["buffer"] = _told(_changed("blocks.1.order", 1))
    torch.manual_seed(rank)
    told["synchronised"] = _told(Mlp(), sync_module_states=True)
    with torch.device("meta"):
        module = Mlp()
    torch.manual_seed(rank // 2)
    told["meta"] = _told(module, auto_wrap_policy={Block})
    with torch.device("meta"):
        module = Mlp()
    told["later"] = _told(module, param_init_fn="later")
    return told


def test_ranks_that_start_from_other_values_warn_on_the_first(ranks: KeptRanks) -> None:
    first, *others = ranks(3, _other_values)
    assert not any(any(each.values()) for each in others)
    start = {name: each[0] for name, each in first.items() if each}
    assert start.keys() == {"seeds", "element", "first rank", "buffer", "meta"}
    assert start["seeds"].startswith(
        "parameter 'blocks.0.up.weight' differs between ranks: on ranks 1, 2 its values differ "
        "from those on the first rank of the group, as do those of 15 of 15 parameters"
    )
    assert "pass sync_module_states=True" in start["seeds"]
    assert "'blocks.1.up.bias' differs between ranks: on rank 2 its" in start["element"]
    assert "1 of 16 parameters" in start["element"]
    assert "'head.weight' differs between ranks: on ranks 1, 2" in start["first rank"]
    assert start["buffer"].startswith("buffer 'blocks.1.order' differs between ranks: on rank 1")
    assert "'blocks.0.up.weight' differs between ranks: on rank 2" in start["meta"]


class Parts(nn.Module):
    def __init__(self, mesh: Any, value: float) -> None:
        super().__init__()
        whole = torch.arange(24.0).view(6, 4)
        self.split = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
        self.copied = nn.Parameter(distribute_tensor(whole, mesh, [Replicate()]))
        local = torch.full((3,), value)
        self.register_buffer(
            "table", DTensor.from_local(local, mesh, [Replicate()], run_check=False)
        )


def _tensor_parallel() -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    told = _told(Parts(mesh["tp"], 1.0), mesh["dp"])
    assert not told, "local parts are compared along their own data-parallel group"
    module = Parts(mesh["tp"], float(dist.get_rank()))
    model = ZeRO3(module, mesh["dp"], sync_module_states=True)
    table = model.table.to_local()
    assert isinstance(model.table, DTensor)
    assert table.tolist() == [float(mesh["tp"].get_local_rank())] * 3, "of its first dp rank"
    return _told(Parts(mesh["tp"], float(mesh["dp"].get_local_rank())), mesh["dp"])


def test_parts_of_dtensors_are_compared_and_synchronised_along_their_group(
    ranks: KeptRanks,
) -> None:
    # Two data-parallel groups, each with a first rank.
    for rank, told in enumerate(ranks(4, _tensor_parallel)):
        assert [each[:14] for each in told] == ["buffer 'table'"] * (rank < 2)


def _experts() -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))
    number = mesh["ep"].get_local_rank()

    def build(value: float) -> nn.Module:
        module = nn.Module()
        module.dense = nn.Parameter(torch.ones(4))
        module.experts = nn.ModuleDict({str(number): nn.Linear(4, 4)})
        for parameter in module.experts.parameters():
            nn.init.constant_(parameter, value)
        return module

    def choose(module: nn.Module, fqn: str) -> Any:
        return {"process_group": mesh["edp"]} if fqn == f"experts.{number}" else False

    assert not _told(build(number), auto_wrap_policy=choose), "compared with the same expert alone"
    return _told(build(dist.get_rank()), auto_wrap_policy=choose)


def test_experts_are_compared_within_their_group(ranks: KeptRanks) -> None:
    first, *others = ranks(4, _experts)
    assert not any(others)
    assert "parameter 'experts.0.weight' differs between ranks: on rank 2" in first[0]


class Odd(nn.Module):
    """Values that not every backend sends: strided ones, bits, small floats and complex ones."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.randn(5, 3).t())
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.wave = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.register_buffer("turned_too", torch.randn(4, 6)[:, ::2])
        self.register_buffer("mask", torch.rand(7) > 0.5)
        self.register_buffer("small", torch.randn(7).to(torch.float8_e4m3fn))
        self.register_buffer("short", torch.randint(99, (), dtype=torch.int16))
        self.register_buffer("narrow", torch.randn(3).bfloat16())


@on_ranks(3)
def test_values_of_every_kind_go_from_the_first_rank_to_all_also_to_modules_on_meta() -> None:
    torch.manual_seed(dist.get_rank())
    model = ZeRO3(Odd(), sync_module_states=True)
    torch.manual_seed(0)
    first = Odd()
    for name, buffer in model.named_buffers():
        assert_same_on_all_ranks(buffer.contiguous().view(-1).view(torch.uint8), name)
        assert torch.equal(buffer.float(), dict(first.named_buffers())[name].float()), name
    for name, value in full_parameters(model).items():
        assert torch.equal(value, dict(first.named_parameters())[name]), name
    with torch.device("meta" if dist.get_rank() else "cpu"):
        module = _changed("blocks.1.order", 0)
    model = ZeRO3(module, auto_wrap_policy={Block}, sync_module_states=True)
    assert_same_values(model, seeded(Mlp))
    assert model.blocks[1].order.tolist() == [0, 1, 2, 3, 5, 4]


@pytest.mark.parametrize("take", [digest, lambda value: int(device_digest(value))])
def test_a_digest_sees_every_bit_and_its_place(take: Any) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        seen = set()
        for index in (None, 0, 7, 299, 300):
            value = torch.zeros(301, dtype=dtype)
            if index is not None:
                value[index] = 1
            seen.add(take(value))
        assert len(seen) == 5, dtype
    swapped = torch.arange(301.0)
    before = take(swapped)
    swapped[[5, 9]] = swapped[[9, 5]]
    assert take(swapped) != before
    assert take(torch.zeros(301)) != take(-torch.zeros(301))
