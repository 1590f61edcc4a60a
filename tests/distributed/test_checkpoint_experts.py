"""Checkpoints and state dicts where ranks have different experts: any split to any other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as theirs

from layerzero import ZeRO3, checkpoint
from tests.distributed.test_experts import (
    Model,
    NamedExperts,
    StackedExperts,
    train,
    whole_values,
    wrapped,
)
from tests.harness.checks import assert_same_parameters
from tests.harness.ranks import KeptRanks
from tests.harness.reference import OPTIMIZERS, seeded


def _everything(model: ZeRO3, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    """What this rank has, in full."""
    values = checkpoint.get_model_state_dict(model, full=True)
    state = checkpoint.get_optimizer_state_dict(model, optimizer, full=True)["state"]
    return values, {f"{n}: {k}": v for n, own in state.items() for k, v in own.items()}


def _save(folder: str, ep: int, kind: type[nn.Module]) -> Any:
    model, reference = wrapped(ep, kind), seeded(lambda: Model(kind))
    optimizer = train(model, reference, 2)
    checkpoint.save(f"{folder}/ep {ep}", model, optimizer)
    weights, state = theirs.get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=f"{folder}/dcp {ep}")
    values, states = _everything(model, optimizer)
    assert states, "momentum"
    whole = theirs.StateDictOptions(full_state_dict=True)
    assert_same_parameters(theirs.get_model_state_dict(model, options=whole), values)
    with model.summon_full_params(writeback=False):
        summoned = whole_values({n: p.detach().clone() for n, p in model.named_parameters()})
    assert_same_parameters(values, summoned)
    for other in (True, False):
        if ep > 1 and kind is NamedExperts:
            with pytest.raises(NotImplementedError, match="different experts"):
                if other:
                    checkpoint.get_model_state_dict(model, full=True, rank0_only=True)
                else:
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
    for own_ep in eps:
        model = wrapped(own_ep, kind)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        optimizer = OPTIMIZERS["sgd_momentum"](model.parameters())
        checkpoint.load(f"{folder}/ep {ep}", model, optimizer)
        _check(model, optimizer, expected, f"ep {own_ep}")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        optimizer = OPTIMIZERS["sgd_momentum"](model.parameters())
        weights, state = theirs.get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=f"{folder}/dcp {ep}")
        theirs.set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
        _check(model, optimizer, expected, f"ep {own_ep}, torch.distributed.checkpoint")


def _check(model: ZeRO3, optimizer: torch.optim.Optimizer, expected: Any, what: str) -> None:
    for own, whole in zip(_everything(model, optimizer), expected, strict=True):
        assert own
        assert_same_parameters(own, {name: whole[name] for name in own}, what=what)


@pytest.mark.parametrize(
    ("kind", "ep", "num_ranks", "own_eps"),
    [
        (NamedExperts, 2, 4, [1, 4]),
        (StackedExperts, 2, 4, [1, 4]),
        pytest.param(NamedExperts, 2, 4, [2], marks=pytest.mark.soak),
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
