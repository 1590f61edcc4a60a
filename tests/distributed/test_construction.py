"""What wrapping leaves of a module: names, values, marks; from which states it can start."""

import gc
import itertools
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import layerzero
from layerzero import ZeRO3
from tests.harness.checks import assert_bitwise, assert_same_parameters
from tests.harness.compare import assert_same_values, assert_trains_alike, sharded, zero3
from tests.harness.models import CASES, WIDTH, Block, Mlp, NoParameters, OddShapes
from tests.harness.ranks import of_all_ranks, on_ranks
from tests.harness.reference import (
    backward_of_all_ranks,
    batches_of,
    forward_backward,
    full_gradients,
    mlp_batches,
    seeded,
)


@on_ranks(3)
def test_names_and_values_are_the_original_ones() -> None:
    for name, case in CASES.items():
        model, plain = sharded(case), seeded(case.build)
        assert _names(model) == _names(plain), name
        assert list(model.state_dict()) == list(plain.state_dict()), name
        assert_same_values(model, plain, what=f"{name}: parameter")
        buffers, expected = dict(model.named_buffers()), dict(plain.named_buffers())
        assert_same_parameters(buffers, expected, what=f"{name}: buffer")
        for own, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert isinstance(own, nn.Parameter) and own.dim() == 1
            assert own.requires_grad == other.requires_grad
            assert own.dtype == other.dtype
        sharded_params = dict(model.named_parameters())
        with model.summon_full_params():
            assert _names_by_parameter(model) == _names_by_parameter(plain), name
            full = dict(model.named_parameters())
            assert_same_parameters(full, dict(plain.named_parameters()), what=f"{name}: full")
            for key, parameter in full.items():
                assert isinstance(parameter, nn.Parameter), key
                assert parameter.requires_grad == plain.get_parameter(key).requires_grad, key
                assert model.get_parameter(key) is parameter, key
        after = dict(model.named_parameters())
        assert list(after) == list(sharded_params)
        assert all(after[key] is sharded_params[key] for key in sharded_params), name


def _names(model: nn.Module) -> dict[str, list[Any]]:
    return {
        "parameters": [name for name, _ in model.named_parameters()],
        "buffers": [name for name, _ in model.named_buffers()],
        "modules": [name for name, _ in model.named_modules()],
        "children": [name for name, _ in model.named_children()],
        "of one parameter": _names_by_parameter(model),
    }


def _names_by_parameter(model: nn.Module) -> list[list[str]]:
    found: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(parameter, []).append(name)
    return list(found.values())


@on_ranks(3)
def test_a_shard_is_its_range_of_the_flattened_original_and_ranges_tile_it() -> None:
    def build() -> nn.Module:
        model = OddShapes()
        model.shift.tensor_model_parallel = True
        return model

    model, plain = zero3(build, nn.Sequential), seeded(build)
    marked = [p for p in model.parameters() if hasattr(p, "tensor_model_parallel")]
    assert len(marked) == 1 and marked[0] is model.shift
    with model.summon_full_params():
        assert model.shift.tensor_model_parallel, "attributes are there, too"
    pairs = zip(model.parameters(), plain.named_parameters(), strict=True)
    for own, (name, full) in pairs:
        info = own.layerzero
        assert (info.fqn, info.shape) == (name, full.shape)
        assert_bitwise(own.detach(), full.detach().reshape(-1)[slice(*info.range)], name)
        ranges = [(start, stop) for start, stop in of_all_ranks(info.range) if start < stop]
        borders = [0, *(stop for _, stop in ranges)]
        assert [*itertools.pairwise(borders)] == ranges and borders[-1] == full.numel(), name


@on_ranks(2)
def test_ignored_modules_and_parameters_are_left_alone() -> None:
    model = seeded(Mlp)
    before = dict(model.named_parameters())
    options = {
        "ignored_modules": [model.blocks[1]],
        "ignored_parameters": [model.blocks[0].up.bias, model.head.weight],
    }
    wrapped = ZeRO3(model, auto_wrap_policy={Block}, **options)
    ignored = ("blocks.1.", "blocks.0.up.bias", "head.weight")
    assert list(dict(wrapped.named_parameters())) == list(before)
    for name, parameter in wrapped.named_parameters():
        assert (parameter is before[name]) == name.startswith(ignored), name
    # Sharded gradients are the mean over ranks, those of ignored parameters the rank's own.
    step = mlp_batches(1)[0]
    local, mean = seeded(Mlp), seeded(Mlp)
    for each in (wrapped, local):
        forward_backward(each, step[dist.get_rank()])
    backward_of_all_ranks(mean, step)
    expected = {
        name: (local if name.startswith(ignored) else mean).get_parameter(name).grad
        for name in before
    }
    assert_same_parameters(full_gradients(wrapped), expected, what="gradient of")


@on_ranks(2)
def test_a_module_without_parameters_can_be_wrapped() -> None:
    model = ZeRO3(nn.Sequential(nn.Tanh(), nn.ReLU()))
    batch = torch.randn(2, WIDTH, requires_grad=True)
    model(batch).sum().backward()
    assert batch.grad is not None
    assert list(model.parameters()) == []
    wrapped = zero3(NoParameters, Block, nn.Sequential)
    assert {unit.fqn for unit in layerzero.units(wrapped)} >= {"block"}


@on_ranks(4)
def test_a_process_group_or_an_axis_of_a_mesh_may_be_part_of_the_world() -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    index = dist.get_rank() // 2
    batches = batches_of(CASES["mlp"], 2, steps=2, seed=index)  # each pair has its own
    model = zero3(Mlp, Block, process_group=pairs[index])
    assert_trains_alike(model, seeded(Mlp), batches, group=pairs[index])
    with pytest.raises(ValueError, match=r"rank|group"):
        ZeRO3(Mlp(), process_group=pairs[1 - index])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    model = zero3(Mlp, Block, process_group=mesh["inner"])
    assert_trains_alike(model, seeded(Mlp), batches, group=mesh["inner"].get_group())
    whole = init_device_mesh("cpu", (4,))
    batches = batches_of(CASES["mlp"], 4, steps=1)
    assert_trains_alike(zero3(Mlp, Block, process_group=whole), seeded(Mlp), batches)


@on_ranks(2)
def test_from_meta_only_one_unit_is_whole_at_a_time() -> None:
    depth, width = 6, 32
    with torch.device("meta"):
        module = nn.Sequential(*(Block(width, width) for _ in range(depth)), nn.Linear(width, 3))
    unit_nbytes = sum(p.numel() * 4 for p in module[0].parameters())
    root_nbytes = sum(p.numel() * 4 for p in module[-1].parameters())
    made: list[weakref.ref[nn.Parameter]] = []
    alive: list[int] = []

    def initialise(part: nn.Module) -> None:
        part.reset_parameters()
        made.extend(weakref.ref(parameter) for parameter in part.parameters(recurse=False))
        alive.append(sum(p.nbytes for reference in made if (p := reference()) is not None))

    gc.disable()  # what only the collector frees would count as well
    try:
        ZeRO3(module, auto_wrap_policy={Block}, param_init_fn=initialise)
    finally:
        gc.enable()
    assert len(alive) == 2 * depth + 1
    assert max(alive) <= unit_nbytes + root_nbytes
