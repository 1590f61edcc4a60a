"""A model of which only parts are wrapped, each by itself, has state dicts and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as theirs

from layerzero import ZeRO3, checkpoint
from tests.harness.checks import assert_bitwise, assert_same_parameters
from tests.harness.models import WIDTH, Block, Mlp, loss_of
from tests.harness.ranks import run_ranks

State = dict[str, Any]


def _parts(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(Block(), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), Mlp())


def _build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = _parts(seed)
    model[0] = ZeRO3(model[0])
    model[3] = ZeRO3(model[3], auto_wrap_policy={Block})
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(2):
        # The same on all ranks: nobody reduces what is not wrapped.
        batch = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(step))
        loss_of(model(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()


def _everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[State, State]:
    full = checkpoint.get_model_state_dict(model, full=True)
    return full, checkpoint.get_optimizer_state_dict(model, optimizer, full=True)["state"]


def _assert_same(actual: tuple[State, State], expected: tuple[State, State], what: str) -> None:
    assert_same_parameters(actual[0], expected[0], what=what)
    assert actual[1].keys() == expected[1].keys(), what
    for name, state in expected[1].items():
        own = {key: actual[1][name][key] for key in state}
        assert_same_parameters(own, state, what=f"{what}: {name}")


def _write(folder: str) -> tuple[State, State]:
    model, optimizer = _build(0)
    _train(model, optimizer)
    plain = _parts(0)
    _train(plain, torch.optim.AdamW(plain.parameters(), lr=0.05))
    everything = _everything(model, optimizer)
    assert everything[0].keys() == plain.state_dict().keys()
    assert everything[1].keys() == dict(plain.named_parameters()).keys()
    assert_same_parameters(everything[0], plain.state_dict())
    streamed = {name: value.clone() for name, value in checkpoint.stream_full(model, 200)}
    for name, value in streamed.items():
        assert_bitwise(value, everything[0][name], name)
    whole = theirs.StateDictOptions(full_state_dict=True)
    weights, state = theirs.get_state_dict(model, optimizer, options=whole)
    _assert_same((weights, state["state"]), everything, "torch's full_state_dict")

    other, other_optimizer = _build(1)
    first = dist.get_rank() == 0
    given = everything[0] if first else {}
    state = checkpoint.get_optimizer_state_dict(model, optimizer, full=True, rank0_only=True)
    assert bool(state) == first
    checkpoint.set_model_state_dict(other, given, broadcast_from_rank0=True)
    checkpoint.set_optimizer_state_dict(other, other_optimizer, state, broadcast_from_rank0=True)
    _assert_same(_everything(other, other_optimizer), everything, "broadcast")
    checkpoint.save(f"{folder}/ours", model, optimizer)
    weights, state = theirs.get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=f"{folder}/theirs")
    return everything


def _read(folder: str, expected: tuple[State, State]) -> None:
    model, optimizer = _build(2)
    checkpoint.load(f"{folder}/ours", model, optimizer)
    _assert_same(_everything(model, optimizer), expected, "load")
    model, optimizer = _build(3)
    weights, state = theirs.get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=f"{folder}/theirs")
    theirs.set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    _assert_same(_everything(model, optimizer), expected, "torch.distributed.checkpoint")


def test_parts_that_are_wrapped_by_themselves_make_one_checkpoint(tmp_path: Path) -> None:
    expected = run_ranks(2, _write, str(tmp_path))[0]
    run_ranks(3, _read, str(tmp_path), expected)


def _apart() -> None:
    rank = dist.get_rank()
    groups = [dist.new_group([each]) for each in range(2)]
    model = nn.Sequential(ZeRO3(Mlp(), groups[rank]), ZeRO3(Mlp(), groups[rank]))
    assert checkpoint.get_model_state_dict(model, full=True).keys() == _names(model)
    mixed = nn.Sequential(ZeRO3(Mlp(), groups[rank]), ZeRO3(Mlp()))
    assert checkpoint.get_model_state_dict(mixed, full=True).keys() == _names(mixed)
    with pytest.raises(ValueError, match="expected a ZeRO3 module, got Mlp, which contains none"):
        checkpoint.get_model_state_dict(Mlp(), full=True)


def _names(model: nn.Module) -> set[str]:
    return {name for name, value in model.state_dict().items() if isinstance(value, Tensor)}


def test_parts_may_be_on_fewer_ranks() -> None:
    run_ranks(2, _apart)
