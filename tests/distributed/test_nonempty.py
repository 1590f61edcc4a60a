"""Optimizers that fail on empty tensors train without them, and their state is right."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from layerzero import ZeRO3
from layerzero.checkpoint import (
    CheckpointError,
    get_optimizer_state_dict,
    load,
    save,
    set_optimizer_state_dict,
)
from layerzero.optim import decay_groups
from tests.harness.checks import assert_bitwise
from tests.harness.models import WIDTH, Block, Mlp, OddShapes, OddShapesBlock, loss_of
from tests.harness.ranks import KeptRanks

CASES = {"mlp": (Mlp, Block), "odd shapes": (OddShapes, OddShapesBlock)}


class Picky(torch.optim.AdamW):
    """As optimizers whose kernels fail on an empty tensor."""

    def add_param_group(self, group: dict[str, Any]) -> None:
        super().add_param_group(group)
        empty = [p for p in self.param_groups[-1]["params"] if not p.numel()]
        assert not empty, "an empty tensor"


def _run(name: str, lr: float, picky: bool, seed: int = 0) -> tuple[ZeRO3, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    build, unit = CASES[name]
    model = ZeRO3(build(), auto_wrap_policy={unit})
    groups = decay_groups(model, weight_decay=0.3)
    if not picky:
        return model, torch.optim.AdamW(groups, lr=lr)
    with pytest.raises(AssertionError, match="an empty tensor"):
        Picky(decay_groups(model), lr=lr)
    nonempty = [{**g, "params": [p for p in g["params"] if p.numel()]} for g in groups]
    return model, Picky(nonempty, lr=lr)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        loss_of(model(torch.randn(3, WIDTH, generator=generator))).backward()
        optimizer.step()
        optimizer.zero_grad()


def _full(model: ZeRO3, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return get_optimizer_state_dict(model, optimizer, full=True)


def _assert_same_state(one: dict[str, Any], other: dict[str, Any]) -> None:
    """`one` may lack state of parameters that are empty on all ranks."""
    for name, state in other["state"].items():
        if name not in one["state"]:
            assert not state["exp_avg"].numel(), name
            continue
        for key, value in state.items():
            assert_bitwise(one["state"][name][key], value, f"{name} {key}")
    for group, theirs in zip(one["param_groups"], other["param_groups"], strict=True):
        listed, expected = set(group.pop("params")), set(theirs.pop("params"))
        assert listed <= expected and all(name.endswith("empty") for name in expected - listed)
        assert group == theirs


def _saves(root: str, name: str) -> dict[str, Any]:
    plain, picky = _run(name, 0.01, False), _run(name, 0.01, True)
    for model, optimizer in (plain, picky):
        _train(model, optimizer)
    for own, other in zip(picky[0].parameters(), plain[0].parameters(), strict=True):
        assert torch.equal(own, other)
    _assert_same_state(_full(*picky), _full(*plain))
    save(root, *picky)
    # Shards on the same ranks.
    fresh = _run(name, 0.5, True, seed=1)
    set_optimizer_state_dict(*fresh, get_optimizer_state_dict(*picky))
    _assert_same_state(_full(*fresh), _full(*plain))
    dcp.save(get_optimizer_state_dict(*picky), checkpoint_id=f"{root}/dcp")
    return _full(*picky)


def _loads(root: str, name: str, full: dict[str, Any]) -> None:
    """On other ranks, into either kind of optimizer; the learning rate shows that options came."""
    for picky in (True, False):
        loaded, given = _run(name, 0.5, picky, seed=2), _run(name, 0.5, picky, seed=3)
        # Plain ones have groups with parameters that are empty on every rank.
        strict = picky or name == "mlp"
        if not strict:
            with pytest.raises(CheckpointError, match=r"group 0 has .* blocks.0.empty"):
                load(f"{root}/step-00000000", *loaded)
        load(f"{root}/step-00000000", *loaded, strict=strict)
        set_optimizer_state_dict(*given, copy.deepcopy(full), strict=strict)
        for run in (loaded, given):
            _assert_same_state(copy.deepcopy(full), _full(*run))
            _train(*run)


def _loads_through_torch(root: str, name: str) -> str:
    model, optimizer = _run(name, 0.5, True)
    state = get_optimizer_state_dict(model, optimizer)
    dcp.load(state, checkpoint_id=f"{root}/dcp")
    try:
        set_optimizer_state_dict(model, optimizer, state)
    except CheckpointError as error:
        return str(error)
    return ""


def test_state_of_an_optimizer_without_empty_tensors_goes_to_any_ranks(
    ranks: KeptRanks, tmp_path: Path
) -> None:
    """Of a model with parameters that are empty on every rank."""
    full = ranks(4, _saves, str(tmp_path), "odd shapes")[0]
    ranks(2, _loads, str(tmp_path), "odd shapes", full)
    # torch keeps the groups of one rank, so ranks with other parameters must not take them.
    for world_size in (4, 2):
        errors = [
            *filter(None, ranks(world_size, _loads_through_torch, str(tmp_path), "odd shapes"))
        ]
        lacked = "has parameters that the saved optimizer lacked: "
        assert errors and all(lacked in each for each in errors)


@pytest.mark.slow
def test_state_of_parameters_that_are_empty_on_some_ranks_goes_to_others(
    ranks: KeptRanks, tmp_path: Path
) -> None:
    full = ranks(4, _saves, str(tmp_path), "mlp")[0]
    ranks(3, _loads, str(tmp_path), "mlp", full)
