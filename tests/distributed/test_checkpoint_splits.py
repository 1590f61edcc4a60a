"""Checkpoints and state dicts where ranks have parts of a model: any split to any other."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
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
from tests.distributed.test_experts import (
    Model,
    NamedExperts,
    StackedExperts,
    train,
    wrapped,
)
from tests.distributed.test_tensor_parallel import LENGTH, VOCAB, Block, Llama, parallelize
from tests.harness.checks import assert_bitwise, assert_same_parameters
from tests.harness.ranks import KeptRanks
from tests.harness.reference import OPTIMIZERS, full_parameters, seeded
from tests.harness.saved_models import assert_same, everything, values_and_states


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


def _write(root: str, num_tensor: int, in_sequence: bool, zero3_size: int | None) -> Any:
    model, optimizer = _build(0, num_tensor, in_sequence, zero3_size=zero3_size)
    _train(model, optimizer)
    save(f"{root}/ours", model, optimizer)
    weights, state = theirs.get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=f"{root}/dcp")
    expected = everything(model, optimizer)
    whole = theirs.StateDictOptions(full_state_dict=True)
    found = theirs.get_state_dict(model, optimizer, options=whole)
    assert_same(found, expected, "full_state_dict=True")
    for name, value in stream_full(model, 600):
        assert_bitwise(value, expected[0][name], name)
    # A handing round of full values, from one rank to all.
    other, other_optimizer = _build(5, num_tensor, in_sequence, zero3_size=zero3_size)
    is_first = dist.get_rank() == 0
    given, state = expected if is_first else ({}, {})
    set_model_state_dict(other, given, broadcast_from_rank0=True)
    set_optimizer_state_dict(other, other_optimizer, state, broadcast_from_rank0=True)
    assert_same(everything(other, other_optimizer), expected, "broadcast")
    other.load_state_dict(model.state_dict())
    with model.summon_full_params(writeback=False):
        for name, value in model.state_dict().items():
            assert_bitwise(
                value.full_tensor() if hasattr(value, "full_tensor") else value,
                expected[0][name],
                name,
            )
        other.load_state_dict(model.state_dict())  # DTensors
    assert_same(everything(other, other_optimizer), expected, "shards")
    return expected


def _read(root: str, num_tensors: list[int], expected: Any) -> None:
    for num_tensor in num_tensors:
        for in_sequence in (True, False)[: 1 + (num_tensor > 1)]:
            what = f"{dist.get_world_size()} ranks, tp {num_tensor}, {in_sequence}"
            model, optimizer = _build(1, num_tensor, in_sequence)
            load(f"{root}/ours", model, optimizer)
            assert_same(everything(model, optimizer), expected, what)
            model, optimizer = _build(2, num_tensor, in_sequence)
            tools: Any = theirs if in_sequence else checkpoint  # torch's functions, or ours
            both = {
                "model": tools.get_model_state_dict(model),
                "optimizer": tools.get_optimizer_state_dict(model, optimizer),
            }
            dcp.load(both, checkpoint_id=f"{root}/dcp")
            tools.set_model_state_dict(model, both["model"])
            tools.set_optimizer_state_dict(model, optimizer, both["optimizer"])
            assert_same(everything(model, optimizer), expected, f"{what}, DCP")
            if num_tensor <= 2:  # there are two heads
                _train(model, optimizer, 1)


@pytest.mark.parametrize(
    ("num_ranks", "num_tensor", "in_sequence", "zero3_size", "readers"),
    [
        (2, 2, True, None, {1: [1], 4: [2]}),
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
    ranks: KeptRanks,
) -> None:
    """Readers: by number of ranks, over how many a tensor is split."""
    expected = ranks(num_ranks, _write, str(tmp_path), num_tensor, in_sequence, zero3_size)[0]
    for name, value in load_file(tmp_path / "ours/step-00000000/model.safetensors").items():
        assert_bitwise(value, expected[0][name], name)
    for world_size, splits in readers.items():
        ranks(world_size, _read, str(tmp_path), splits, expected)


def _save(folder: str, ep: int, kind: type[nn.Module]) -> Any:
    model, reference = wrapped(ep, kind), seeded(lambda: Model(kind))
    optimizer = train(model, reference, 2)
    checkpoint.save(f"{folder}/ep {ep}", model, optimizer)
    weights, state = theirs.get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=f"{folder}/dcp {ep}")
    values, states = values_and_states(model, optimizer)
    assert states, "momentum"
    whole = theirs.StateDictOptions(full_state_dict=True)
    assert_same_parameters(theirs.get_model_state_dict(model, options=whole), values)
    assert_same_parameters(values, full_parameters(model))
    if kind is NamedExperts:
        with pytest.raises(NotImplementedError, match="different experts"):
            checkpoint.get_model_state_dict(model, full=True, rank0_only=True)
        with pytest.raises(NotImplementedError, match="different experts"):
            checkpoint.set_model_state_dict(model, values, broadcast_from_rank0=True)
    if kind is StackedExperts:
        fresh = wrapped(ep, kind)
        given = values if dist.get_rank() == 0 else {}
        checkpoint.set_model_state_dict(fresh, given, broadcast_from_rank0=True)
        everything = checkpoint.get_model_state_dict(fresh, full=True)
        assert_same_parameters(everything, values, what="broadcast")
    fresh = wrapped(ep, kind)
    fresh.load_state_dict(model.state_dict())
    assert_same_parameters(checkpoint.get_model_state_dict(fresh, full=True), values)
    return values, states


def _load(folder: str, ep: int, eps: Sequence[int], kind: type[nn.Module], expected: Any) -> None:
    def zeros(own_ep: int) -> tuple[ZeRO3, torch.optim.Optimizer]:
        model = wrapped(own_ep, kind)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        return model, OPTIMIZERS["sgd_momentum"](model.parameters())

    for own_ep in eps:
        model, optimizer = zeros(own_ep)
        checkpoint.load(f"{folder}/ep {ep}", model, optimizer)
        _check(model, optimizer, expected, f"ep {own_ep}")
        model, optimizer = zeros(own_ep)
        weights, state = theirs.get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=f"{folder}/dcp {ep}")
        theirs.set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
        _check(model, optimizer, expected, f"ep {own_ep}, torch.distributed.checkpoint")


def _check(model: ZeRO3, optimizer: torch.optim.Optimizer, expected: Any, what: str) -> None:
    for own, whole in zip(values_and_states(model, optimizer), expected, strict=True):
        assert own
        assert_same_parameters(own, {name: whole[name] for name in own}, what=what)


@pytest.mark.parametrize(
    ("kind", "ep", "num_ranks", "own_eps"),
    [
        (NamedExperts, 2, 4, [1, 4]),
        (StackedExperts, 2, 4, [1, 4]),
        pytest.param(StackedExperts, 1, 2, [2], marks=pytest.mark.slow),
    ],
)
def test_checkpoints_of_experts_load_at_any_split(
    tmp_path: Path,
    kind: type[nn.Module],
    ep: int,
    num_ranks: int,
    own_eps: list[int],
    ranks: KeptRanks,
) -> None:
    """Into one split that is coarser and one that is finer; others with `--slow`."""
    expected: Any = ({}, {})
    for values in ranks(4, _save, str(tmp_path), ep, kind, in_float64=True):
        for into, own in zip(expected, values, strict=True):
            into.update(own)
    ranks(num_ranks, _load, str(tmp_path), ep, own_eps, kind, expected, in_float64=True)
    ranks(1, _load, str(tmp_path), ep, [1], kind, expected, in_float64=True)
