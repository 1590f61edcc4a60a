"""Every optimizer of torch.optim is in the table of docs/howto/optimizers.md, which holds; those
that fail on empty tensors train without them, and their state is right. What a sharded parameter
was: `parameter.layerzero`, groups made from it, and warnings where code takes shards for whole."""

import copy
import inspect
import re
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import layerzero
from layerzero import ZeRO3, checkpoint, rewrap
from layerzero.optim import decay_groups
from tests.harness.checks import assert_bitwise, recorded_warnings
from tests.harness.compare import assert_same_values, sharded, zero3
from tests.harness.models import CASES, WIDTH, Block, Mlp, TiedAcrossUnits, loss_of
from tests.harness.pages import DOCS
from tests.harness.ranks import KeptRanks, on_ranks
from tests.harness.reference import batches_of, forward_backward, on_meta, seeded

STEPS = 2
FLAGS = (
    "foreach",
    "fused",
    "amsgrad",
    "maximize",
    "nesterov",
    "centered",
    "decoupled_weight_decay",
)
"""Options that choose another implementation or formula."""


def _classes() -> dict[str, type[torch.optim.Optimizer]]:
    return {
        name: each
        for name, each in vars(torch.optim).items()
        if inspect.isclass(each)
        and issubclass(each, torch.optim.Optimizer)
        and each is not torch.optim.Optimizer
    }


def _table() -> dict[str, str]:
    """Class -> what the page says of it."""
    rows = re.findall(
        r"^\| (`\w+`.*?) \| (.*) \|$", (DOCS / "howto/optimizers.md").read_text(), re.M
    )
    return {name: says for names, says in rows for name in re.findall(r"`(\w+)`", names)}


def _element_wise() -> list[str]:
    return [name for name, says in _table().items() if says.startswith("as it is")]


def _settings(name: str) -> list[dict[str, Any]]:
    """Its options, one flag at a time."""
    cls = _classes()[name]
    known = inspect.signature(cls).parameters
    plain: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "momentum": 0.9}
    base = {key: value for key, value in plain.items() if key in known}
    found = [base, {**base, "lr": torch.tensor(1e-2), "foreach": False}]
    found += [{**base, flag: True} for flag in FLAGS if flag in known]
    return found


def _same_bits() -> None:
    """Gradients are given, so what is compared is the optimizers alone."""
    case = CASES["mlp"]
    start = seeded(case.build)
    gradients = [[torch.randn_like(p) for p in start.parameters()] for _ in range(STEPS)]
    tried: list[str] = []
    for name in _element_wise():
        cls = _classes()[name]
        for options in _settings(name):
            model, plain = sharded(case), seeded(case.build)
            try:
                reference = cls(decay_groups(plain, 0.2), **options)
            except (RuntimeError, ValueError):
                continue  # torch has no such variant here.
            own = cls(decay_groups(model, 0.2), **options)
            for step in gradients:
                for shard, full, gradient in zip(
                    model.parameters(), plain.parameters(), step, strict=True
                ):
                    full.grad = gradient.clone()
                    shard.grad = gradient.reshape(-1)[slice(*shard.layerzero.range)].clone()
                own.step()
                reference.step()
            assert_same_values(model, plain, f"{name}({options}): parameter")
            pairs = zip(plain.parameters(), start.parameters(), strict=True)
            assert not all(torch.equal(one, other) for one, other in pairs), name
            tried.append(name)
    assert set(tried) == set(_element_wise()) and len(tried) > 3 * len(_element_wise())


def _refused() -> None:
    case = CASES["mlp"]
    model = sharded(case)
    batch = batches_of(case, 2, 1)[0][torch.distributed.get_rank()]
    forward_backward(model, batch)
    for name, says in _table().items():
        if says.startswith("as it is"):
            continue
        [error] = re.findall(r"(?:ValueError|NotImplementedError|RuntimeError)", says)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with pytest.raises({"ValueError": ValueError}.get(error, RuntimeError)) as raised:
            optimizer = _classes()[name](model.parameters())
            optimizer.step(lambda: None) if name == "LBFGS" else optimizer.step()
        assert raised.type.__name__ == error, (name, raised.value)
        assert all(
            torch.equal(p.detach(), old) for p, old in zip(model.parameters(), before, strict=True)
        )


def test_every_class_is_in_the_table() -> None:
    assert _table().keys() == _classes().keys()


@pytest.mark.slow
@on_ranks(2)
def test_the_table_is_true() -> None:
    assert len(_element_wise()) > 5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*(deprecated|lr_scheduler).*")
        _same_bits()
    _refused()


class Picky(torch.optim.AdamW):
    """As optimizers whose kernels fail on an empty tensor."""

    def add_param_group(self, group: dict[str, Any]) -> None:
        super().add_param_group(group)
        empty = [p for p in self.param_groups[-1]["params"] if not p.numel()]
        assert not empty, "an empty tensor"


def _run(
    cls: type[torch.optim.Optimizer], lr: float, steps: int = 0
) -> tuple[ZeRO3, torch.optim.Optimizer]:
    """A model, of which some parameters are empty on this rank, and one is on all."""
    model = sharded(CASES["odd_shapes"])
    groups = decay_groups(model, weight_decay=0.3)
    if cls is Picky:
        with pytest.raises(AssertionError, match="an empty tensor"):
            cls(decay_groups(model), lr=lr)
        groups = [{**g, "params": [p for p in g["params"] if p.numel()]} for g in groups]
    optimizer = cls(groups, lr=lr)
    for step in range(steps):
        draw = torch.Generator().manual_seed(step)
        forward_backward(model, CASES["odd_shapes"].batch(draw))
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def _full(model: ZeRO3, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return checkpoint.get_optimizer_state_dict(model, optimizer, full=True)


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


def _saves(root: str) -> dict[str, Any]:
    plain, picky = (_run(cls, 0.01, steps=2) for cls in (torch.optim.AdamW, Picky))
    for own, other in zip(picky[0].parameters(), plain[0].parameters(), strict=True):
        assert torch.equal(own, other)
    _assert_same_state(_full(*picky), _full(*plain))
    checkpoint.save(root, *picky)
    return _full(*picky)


def _loads(root: str, full: dict[str, Any]) -> None:
    """On other ranks, into either kind of optimizer; the learning rate shows that options came."""
    for cls in (Picky, torch.optim.AdamW):
        loaded, given = _run(cls, 0.5), _run(cls, 0.5)
        # Plain ones have groups with parameters that are empty on every rank.
        if cls is not Picky:
            with pytest.raises(checkpoint.CheckpointError, match=r"group 0 has .* blocks.0.empty"):
                checkpoint.load(f"{root}/step-00000000", *loaded)
        checkpoint.load(f"{root}/step-00000000", *loaded, strict=cls is Picky)
        checkpoint.set_optimizer_state_dict(*given, copy.deepcopy(full), strict=cls is Picky)
        for run in (loaded, given):
            _assert_same_state(copy.deepcopy(full), _full(*run))


def test_state_of_an_optimizer_without_empty_tensors_goes_to_any_ranks(
    ranks: KeptRanks, tmp_path: Path
) -> None:
    full = ranks(4, _saves, str(tmp_path))[0]
    ranks(2, _loads, str(tmp_path), full)


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


class Signed(torch.optim.Optimizer):
    """Element-wise, but of no class that is known."""

    def __init__(self, params: Any, lr: float = 0.0) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad.sign(), alpha=-group["lr"])


class Around(torch.optim.Optimizer):
    """Around another one, and not initialised, as OrthoGrad and TRAC of pytorch_optimizer."""

    def __init__(self, inside: torch.optim.Optimizer) -> None:
        self._optimizer_step_pre_hooks = self._optimizer_step_post_hooks = OrderedDict()
        self._patch_step_function()
        self.inside, self.param_groups = inside, inside.param_groups

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad /= parameter.grad.norm() + 1
        return self.inside.step(closure)


class Renamed(torch.optim.AdamW):
    """Steps as a known class does."""


def _with_gradients(**options: Any) -> Any:
    model = zero3(Mlp, Block, **options)
    loss_of(model(torch.ones(2, WIDTH))).backward()
    return model


def _expect(told: list[str], *parts: str) -> None:
    """On the first rank one message with these parts; on others none."""
    assert len(told) == (1 if parts and dist.get_rank() == 0 else 0), told
    assert all(part in message for message in told for part in parts), told


def _steps(optimizer: torch.optim.Optimizer) -> list[str]:
    """What two steps warn of."""
    with recorded_warnings() as told:
        optimizer.step()
        optimizer.step()
    return told


def _groups() -> None:
    model = _with_gradients()
    sharded_params = list(model.parameters())

    def steps(*groups: tuple[list[nn.Parameter], float]) -> list[str]:
        made = [{"params": params, "weight_decay": decay} for params, decay in groups]
        return _steps(torch.optim.AdamW(made, lr=1e-3))

    # In backward it steps with one unit: a group that has nothing there is not empty.
    parts = [(sharded_params[:1], 0.0), (sharded_params[1:], 0.1)]
    groups = [{"params": params, "weight_decay": decay} for params, decay in parts]
    model.step_in_backward(torch.optim.AdamW(groups, lr=1e-3))
    with recorded_warnings() as told:
        loss_of(model(torch.ones(2, WIDTH))).backward()
    _expect(told)
    model.step_in_backward(None)
    loss_of(model(torch.ones(2, WIDTH))).backward()

    matrices, vectors = (group["params"] for group in decay_groups(model))
    _expect(steps((matrices, 0.1), (vectors, 0.0)))
    _expect(steps((sharded_params, 0.1)))
    _expect(steps((sharded_params, 0.1), ([], 0.1)))
    _expect(steps((matrices, 0.1), ([], 0.0)))
    # The usual recipe: weight decay for matrices. Shards have one dimension.
    split = [[p for p in sharded_params if (p.ndim >= 2) == large] for large in (True, False)]
    advice = "decay_groups(model, weight_decay=0.1)"
    _expect(steps((split[0], 0.1), (split[1], 0.0)), "weight_decay=0.1 is empty", advice)
    _expect(steps((split[0], 0.1), (split[1], 0.0)))  # once


@on_ranks(2)
def test_what_takes_shards_for_whole_parameters_warns_once_or_is_refused() -> None:
    _groups()  # Before a warning, which comes once.
    model = _with_gradients()
    for name in ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam"):
        _expect(_steps(getattr(torch.optim, name)(model.parameters(), lr=1e-3)))
    _expect(_steps(layerzero.optim.AdamW(model.parameters(), lr=1e-3)))
    _expect(_steps(Renamed(model.parameters())))
    for cls, text in (
        (torch.optim.Muon, r"Muon orthogonalizes.*WholeTensorOptimizer"),
        (torch.optim.LBFGS, "LBFGS needs the gradients of"),
        (torch.optim.Adafactor, r"Adafactor needs whole .*optim\.WholeTensorOptimizer\("),
    ):
        with pytest.raises(NotImplementedError, match=text):
            cls(model.parameters())
    whole = "layerzero.optim.WholeTensorOptimizer(model.parameters(), Signed, ...)"
    signed = Signed(model.parameters())
    _expect(_steps(signed), "Signed", "more than one element", whole, "AdamW or SGD")
    _expect(_steps(Signed(model.parameters())))  # once
    around = Around(torch.optim.SGD(model.parameters(), lr=1e-3))
    _expect(_steps(around), "Around was given sharded parameters", "more than one element")
    plain = nn.Linear(3, 3)
    plain(torch.ones(3)).sum().backward()
    _expect(_steps(Signed(plain.parameters())))


@on_ranks(1)
def test_where_shards_are_whole_lbfgs_trains_and_shapes_decide_about_a_warning() -> None:
    plain, model, results = seeded(Mlp), zero3(Mlp, Block), []
    for each in (plain, model):
        optimizer = torch.optim.LBFGS(each.parameters(), lr=0.5, max_iter=3)

        def closure(each: nn.Module = each, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(each(torch.ones(2, WIDTH)))
            loss.backward()
            return loss

        results.append(optimizer.step(closure))
    assert results[0] == results[1]
    assert_same_values(model, plain)
    for layout, parts in (("rows", []), ("elements", ["which are this rank's parts"])):
        model = _with_gradients(layout=layout)
        _expect(_steps(Signed(model.parameters())), *parts)
