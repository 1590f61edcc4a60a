"""Checkpoints and state dicts of tensor-parallel models: any split to any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import state_dict as theirs
from torch.distributed.device_mesh import init_device_mesh

from layerzero import ZeRO3, checkpoint
from layerzero.checkpoint import (
    load,
    save,
    set_model_state_dict,
    set_optimizer_state_dict,
    stream_full,
)
from tests.distributed.test_tensor_parallel import LENGTH, VOCAB, Block, Llama, parallelize
from tests.harness.checks import assert_bitwise, assert_same_parameters
from tests.harness.ranks import KeptRanks
from tests.harness.saved_models import State, everything

MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def _build(
    seed: int, num_tensor: int, in_sequence: bool = True, **options: Any
) -> tuple[ZeRO3, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Llama()
    group = None
    if num_tensor > 1:
        shape = (dist.get_world_size() // num_tensor, num_tensor)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        parallelize(model, mesh["tp"], in_sequence)
        group = mesh["dp"]
    wrapped = ZeRO3(model, group, auto_wrap_policy={Block}, **options)
    return wrapped, torch.optim.AdamW(wrapped.parameters(), lr=0.05)


def _train(model: ZeRO3, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for step in range(steps):
        # The same on all ranks: those of one tensor-parallel group must have it.
        symbols = torch.randint(
            VOCAB, (4, LENGTH + 1), generator=torch.Generator().manual_seed(step)
        )
        model(symbols).backward()
        optimizer.step()
        optimizer.zero_grad()


def _assert_same(actual: tuple[State, State], expected: tuple[State, State], what: str) -> None:
    assert_same_parameters(actual[0], expected[0], what=what)
    assert actual[1]["state"].keys() == expected[1]["state"].keys()
    for name, state in expected[1]["state"].items():
        for key in MOMENTS:
            assert_bitwise(actual[1]["state"][name][key], state[key], f"{what} {name} {key}")


def _write(root: str, num_tensor: int, in_sequence: bool, zero3_size: int | None) -> Any:
    model, optimizer = _build(0, num_tensor, in_sequence, zero3_size=zero3_size)
    _train(model, optimizer)
    save(f"{root}/ours", model, optimizer)
    weights, state = theirs.get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=f"{root}/dcp")
    expected = everything(model, optimizer)
    whole = theirs.StateDictOptions(full_state_dict=True)
    found = theirs.get_state_dict(model, optimizer, options=whole)
    _assert_same(found, expected, "full_state_dict=True")
    for name, value in stream_full(model, 600):
        assert_bitwise(value, expected[0][name], name)
    # A handing round of full values, from one rank to all.
    other, other_optimizer = _build(5, num_tensor, in_sequence, zero3_size=zero3_size)
    is_first = dist.get_rank() == 0
    given, state = expected if is_first else ({}, {})
    set_model_state_dict(other, given, broadcast_from_rank0=True)
    set_optimizer_state_dict(other, other_optimizer, state, broadcast_from_rank0=True)
    _assert_same(everything(other, other_optimizer), expected, "broadcast")
    other.load_state_dict(model.state_dict())
    with model.summon_full_params(writeback=False):
        for name, value in model.state_dict().items():
            assert_bitwise(
                value.full_tensor() if hasattr(value, "full_tensor") else value,
                expected[0][name],
                name,
            )
        other.load_state_dict(model.state_dict())  # DTensors
    _assert_same(everything(other, other_optimizer), expected, "shards")
    return expected


def _read(root: str, num_tensors: list[int], expected: Any) -> None:
    for num_tensor in num_tensors:
        for in_sequence in (True, False)[: 1 + (num_tensor > 1)]:
            what = f"{dist.get_world_size()} ranks, tp {num_tensor}, {in_sequence}"
            model, optimizer = _build(1, num_tensor, in_sequence)
            load(f"{root}/ours", model, optimizer)
            _assert_same(everything(model, optimizer), expected, what)
            model, optimizer = _build(2, num_tensor, in_sequence)
            tools: Any = theirs if in_sequence else checkpoint  # torch's functions, or ours
            both = {
                "model": tools.get_model_state_dict(model),
                "optimizer": tools.get_optimizer_state_dict(model, optimizer),
            }
            dcp.load(both, checkpoint_id=f"{root}/dcp")
            tools.set_model_state_dict(model, both["model"])
            tools.set_optimizer_state_dict(model, optimizer, both["optimizer"])
            _assert_same(everything(model, optimizer), expected, f"{what}, DCP")
            if num_tensor <= 2:  # there are two heads
                _train(model, optimizer, 1)


@pytest.mark.parametrize(
    ("num_ranks", "num_tensor", "in_sequence", "zero3_size", "readers"),
    [
        (2, 2, True, None, {1: [1], 4: [2]}),
        pytest.param(4, 2, True, None, {2: [2]}, marks=pytest.mark.soak),
        pytest.param(4, 2, False, 1, {2: [1]}, marks=pytest.mark.slow),
        pytest.param(3, 1, True, None, {4: [4]}, marks=pytest.mark.slow),
    ],
)
def test_any_split_loads_into_any_other(
    tmp_path: Path,
    num_ranks: int,
    num_tensor: int,
    in_sequence: bool,
    zero3_size: int | None,
    readers: dict[int, list[int]],
    in_full: bool,
    ranks: KeptRanks,
) -> None:
    """Readers: by number of ranks, over how many a tensor is split. `make soak`: all there are."""
    expected = ranks(num_ranks, _write, str(tmp_path), num_tensor, in_sequence, zero3_size)[0]
    for name, value in load_file(tmp_path / "ours/step-00000000/model.safetensors").items():
        assert_bitwise(value, expected[0][name], name)
    for world_size, splits in ({1: [1], 2: [1, 2], 4: [2, 4]} if in_full else readers).items():
        ranks(world_size, _read, str(tmp_path), splits, expected)
