"""What a sharded parameter was: `parameter.layerzero`, and groups made from it."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from layerzero import ZeRO3, rewrap
from layerzero.optim import decay_groups
from tests.harness.compare import sharded, zero3
from tests.harness.models import CASES, WIDTH, Block, Mlp, TiedAcrossUnits, loss_of
from tests.harness.ranks import on_ranks
from tests.harness.reference import on_meta, seeded


class Convolved(nn.Module):
    """Parameters of 0, 1, 2 and 4 dimensions, one of them without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Conv2d(1, 2, 3)
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(()))
        self.empty = nn.Parameter(torch.ones(0, 3))


def _ndims(model: nn.Module) -> dict[str, tuple[str, tuple[int, ...], int]]:
    return {
        name: (p.layerzero.fqn, tuple(p.layerzero.shape), p.layerzero.ndim)
        for name, p in model.named_parameters()
    }


@on_ranks(2)
def test_marks_survive_what_is_done_to_a_model() -> None:
    expected = {
        name: (name, tuple(parameter.shape), parameter.ndim)
        for name, parameter in Convolved().named_parameters()
    }
    model = zero3(Convolved, nn.Linear)
    assert _ndims(model) == expected
    with model.summon_full_params():  # There parameters are whole, and need no mark.
        shown = dict(model.named_parameters())
        assert all(not hasattr(parameter, "layerzero") for parameter in shown.values())
    assert _ndims(model) == expected
    model.load_state_dict(model.state_dict())
    model.load_state_dict(model.state_dict(), assign=True)
    for parameter in model.parameters():
        parameter.requires_grad_(not parameter.requires_grad)
    model.zero_grad()
    model.to(model.out.weight.device)
    assert _ndims(model) == expected
    with pytest.raises(NotImplementedError, match="cannot be copied"):
        copy.deepcopy(model)
    # A copy of a parameter belongs to no model.
    assert not hasattr(copy.deepcopy(model.out.weight), "layerzero")
    options = {"auto_wrap_policy": {nn.Linear}, "device": "cpu", "param_init_fn": "later"}
    late = ZeRO3(on_meta(Convolved), **options)
    assert _ndims(late) == expected
    inner = zero3(lambda: nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)), nn.Linear)
    outer = ZeRO3(nn.ModuleDict({"inside": inner}))
    assert outer["inside"][0].weight.layerzero.fqn == "inside.0.weight"
    model.module.more = nn.Linear(3, 2)
    rewrap(model)
    assert model.module.more.weight.layerzero.shape == (2, 3)
    tied = zero3(TiedAcrossUnits, Block)
    assert tied.blocks[2].up.weight.layerzero.fqn == "blocks.0.up.weight"


def _names(model: nn.Module, groups: list[dict[str, Any]]) -> list[list[str]]:
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    return [[name_of[id(p)] for p in group["params"]] for group in groups]


@on_ranks(2)
def test_groups_are_those_of_the_unsharded_model() -> None:
    for name in ("mlp", "odd_shapes", "tied_across_units", "frozen_parts"):
        case = CASES[name]
        model, plain = sharded(case), seeded(case.build)
        own, expected = (_names(each, decay_groups(each, 0.3)) for each in (model, plain))
        assert own == expected, name
        trainable = {n: p for n, p in plain.named_parameters() if p.requires_grad}
        assert set(own[0]) == {n for n, p in trainable.items() if p.ndim >= 2}
        assert set(own[1]) == trainable.keys() - set(own[0])


@on_ranks(2)
def test_rules_choose_what_does_not_decay() -> None:
    model = zero3(Mlp, Block)
    decayed, others = _names(model, decay_groups(model, no_decay=["blocks.1", "stem.weight"]))
    assert {"blocks.1.up.weight", "stem.weight"} < {*others} and "blocks.0.up.weight" in decayed
    assert _names(model, decay_groups(model, no_decay=[Block]))[0] == ["stem.weight", "head.weight"]
    for model in (Mlp(), zero3(Mlp, Block)):
        everything = dict(model.named_parameters())
        found = decay_groups(model, no_decay="*.up.weight")
        assert {n for n in everything if n.endswith("up.weight")} <= set(_names(model, found)[1])
        rest = [p for name, p in everything.items() if not name.startswith("blocks")]
        only = decay_groups(model, parameters=reversed(rest))
        assert _names(model, only) == [["stem.weight", "head.weight"], ["stem.bias"]]
        everything["head.weight"].requires_grad_(False)
        assert all("head.weight" not in each for each in _names(model, decay_groups(model)))


@on_ranks(2)
def test_groups_are_made_outside_of_summon_full_params() -> None:
    model = zero3(Mlp, Block)
    expected = _names(model, decay_groups(model, no_decay=[Block]))
    sharded = {id(parameter) for parameter in model.parameters()}
    with model.summon_full_params(), pytest.raises(RuntimeError, match="call it outside"):
        decay_groups(model)
    model.unshard()
    assert any(not hasattr(parameter, "layerzero") for parameter in model.parameters())
    groups = decay_groups(model, no_decay=[Block], parameters=model.parameters())
    model.reshard()
    assert {id(p) for group in groups for p in group["params"]} == sharded
    assert _names(model, groups) == expected
    tied = zero3(TiedAcrossUnits, Block)
    listed = _names(tied, decay_groups(tied, no_decay=["blocks.2.up.weight"]))
    assert "blocks.0.up.weight" in listed[1] and "blocks.0.up.weight" not in listed[0]
    assert decay_groups(tied, no_decay=torch.nn.Linear)[0]["params"] == []


@on_ranks(2)
def test_what_matches_nothing_is_refused() -> None:
    model = zero3(Mlp, Block)
    stranger = zero3(Mlp, Block)
    refused: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (TypeError, "no_decay: .* got None", {"no_decay": [None]}),
        (TypeError, "no_decay: .*classes of modules", {"no_decay": [torch.Tensor]}),
        (ValueError, "no_decay: 'LayerNorm' matches no", {"no_decay": [nn.LayerNorm]}),
        (ValueError, r"no_decay: 'bolcks\.\*' matches no", {"no_decay": "bolcks.*"}),
        (
            ValueError,
            r"parameters\[0\], 'stem.weight', is no",
            {"parameters": stranger.parameters()},
        ),
        (ValueError, r"of shape \(2,\), is no", {"parameters": [nn.Parameter(torch.ones(2))]}),
    ]
    for error, text, arguments in refused:
        with pytest.raises(error, match=text):
            decay_groups(**{"model": model, **arguments})
    loss_of(model(torch.ones(2, WIDTH))).backward()
