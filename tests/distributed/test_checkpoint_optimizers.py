"""save and load of several optimizers by name, and of whole states of any shape."""

import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as theirs

from layerzero import ZeRO3
from layerzero.checkpoint import (
    CheckpointError,
    get_model_state_dict,
    get_optimizer_state_dict,
    load,
    save,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from layerzero.optim import WholeTensorOptimizer, decay_groups
from tests.harness.checks import assert_bitwise, assert_same_parameters
from tests.harness.models import WIDTH, Block, Mlp, loss_of
from tests.harness.ranks import KeptRanks, on_ranks
from tests.harness.reference import full_parameters
from tests.harness.whole_optimizers import Shampoo


class Unchecked(torch.optim.SGD):
    """Its step needs a closure, so the keys of its state are unknown."""

    def step(self, closure: Any) -> Any:
        return super().step(closure)


class Lookahead(torch.optim.SGD):
    """With slow weights in a list, which only its own state dict has."""

    def state_dict(self) -> dict[str, Any]:
        return {"base": super().state_dict(), "slow": [p.detach() for p in self._params()]}

    def _params(self) -> list[nn.Parameter]:
        return [p for group in self.param_groups for p in group["params"]]


class Around(torch.optim.Optimizer):
    """Around another one, and not initialised, as timm's Lookahead."""

    def __init__(self, inside: torch.optim.Optimizer) -> None:
        self._optimizer_step_pre_hooks = self._optimizer_step_post_hooks = OrderedDict()
        self.inside, self.state = inside, {}
        self.param_groups, self.defaults = inside.param_groups, inside.defaults

    def step(self, closure: Any = None) -> Any:
        return self.inside.step(closure)

    def state_dict(self) -> dict[str, Any]:
        return self.inside.state_dict()


class Odd(Mlp):
    """With a convolution, a scalar, a parameter without elements, a tied and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))
        self.empty = nn.Parameter(torch.ones(0, 3))
        self.blocks[2].up.weight = self.blocks[0].up.weight
        self.head.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain + self.empty.sum()


def _wrapped(seed: int = 0, **options: Any) -> ZeRO3:
    torch.manual_seed(seed)
    return ZeRO3(Odd(), auto_wrap_policy={Block}, gradient_reduction="sum", **options)


def _optimizers(model: nn.Module, kind: str, lr: float = 0.02) -> dict[str, torch.optim.Optimizer]:
    was = {p: p.layerzero for p in model.parameters() if p.requires_grad}
    matrices = [p for p, info in was.items() if info.ndim == 2]
    chosen = set(matrices)
    rest = [p for p in was if p not in chosen]
    groups = decay_groups(model, 0.1, parameters=[p for p in rest if was[p].fqn != "stem.bias"])
    slow = decay_groups(model, 0.1, parameters=[p for p in rest if was[p].fqn == "stem.bias"])
    groups += [{**group, "lr": 0.5 * lr} for group in slow]
    whole: dict[str, Any] = {
        "muon": lambda: WholeTensorOptimizer(matrices[:-1], torch.optim.Muon, lr=lr),
        "shampoo": lambda: WholeTensorOptimizer(matrices, Shampoo, lr=lr),
        "plain": lambda: torch.optim.SGD(matrices, lr=lr, momentum=0.9),
        "whole_adamw": lambda: WholeTensorOptimizer(matrices, torch.optim.AdamW, lr=lr),
    }
    rest_class = torch.optim.NAdam if kind == "plain" else torch.optim.AdamW
    return {"matrices": whole[kind](), "rest": rest_class(groups, lr=lr)}


def _train(
    model: nn.Module, optimizers: Mapping[str, torch.optim.Optimizer], steps: Iterator[int]
) -> None:
    for step in steps:
        draw = torch.Generator().manual_seed(step)
        loss = loss_of(model(torch.randn(3, WIDTH, generator=draw)))
        # One rank has all the gradient, so that its bits do not depend on the number of ranks.
        (loss * (dist.get_rank() == 0)).backward()
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()


def _schedulers(optimizers: Mapping[str, torch.optim.Optimizer]) -> dict[str, Any]:
    return {n: torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for n, each in optimizers.items()}


def _write(folder: str) -> dict[str, dict[str, Tensor]]:
    """Train, save, train on; the weights at the end, by kind of optimizer."""
    results = {}
    for kind in ("shampoo", "muon", "plain"):
        model = _wrapped()
        optimizers = _optimizers(model, kind)
        schedulers = _schedulers(optimizers)
        _train(model, optimizers, iter((0, 1)))
        for each in schedulers.values():
            each.step()
            each.step()
        save(
            *(f"{folder}/{kind}", model, optimizers),
            step=2,
            scheduler=schedulers,
            blocking=kind != "muon",
        ).wait()
        _train(model, optimizers, iter((2, 3)))
        results[kind] = full_parameters(model)
    return results


def _resume(folder: str, expected: dict[str, dict[str, Tensor]]) -> None:
    for kind in expected:
        model = _wrapped(seed=1)
        optimizers = _optimizers(model, kind, lr=0.9)
        schedulers = _schedulers(optimizers)
        load(f"{folder}/{kind}", model, optimizers, scheduler=schedulers)
        assert {each.last_epoch for each in schedulers.values()} == {2}
        assert optimizers["matrices"].param_groups[0]["lr"] == 0.01
        _train(model, optimizers, iter((2,)))
        if kind == "shampoo":  # A second time, by these ranks.
            save(f"{folder}/again", model, optimizers)
            model = _wrapped(seed=2)
            optimizers = _optimizers(model, kind, lr=0.9)
            load(f"{folder}/again", model, optimizers)
        _train(model, optimizers, iter((3,)))
        assert_same_parameters(full_parameters(model), expected[kind], what=kind)


def test_several_optimizers_resume_bitwise_at_another_number_of_ranks(
    tmp_path: Path, ranks: KeptRanks
) -> None:
    expected = ranks(2, _write, str(tmp_path))[0]
    ranks(3, _resume, str(tmp_path), expected)


@on_ranks(2)
def test_one_optimizer_needs_no_name_and_whole_states_are_the_same_files(tmp_path: Path) -> None:
    model = _wrapped()
    trained = [p for p in model.parameters() if p.requires_grad]
    adamw = torch.optim.AdamW(trained, lr=0.02)
    _train(model, {"": adamw}, iter((0, 1)))
    saved = save(f"{tmp_path}/sharded", model, adamw).path
    _train(model, {"": adamw}, iter((2, 3)))
    ended = full_parameters(model)
    del adamw
    whole = WholeTensorOptimizer(trained, torch.optim.AdamW, lr=0.9)
    load(saved, model, whole)
    again = save(f"{tmp_path}/whole", model, whole).path
    _train(model, {"": whole}, iter((2, 3)))
    assert_same_parameters(full_parameters(model), ended)
    files = [(path / "optimizer.safetensors").read_bytes() for path in (saved, again)]
    assert files[0] == files[1]
    manifest = json.loads((saved / "checkpoint.json").read_bytes())
    assert manifest["version"] == 1 and "scheduler_names" not in manifest
    assert all(group.keys() == {"options", "params"} for group in manifest["optimizer_groups"])


@on_ranks(2)
def test_names_are_checked_and_what_fits_loads_on_request(tmp_path: Path) -> None:
    model = _wrapped()
    own = _optimizers(model, "muon")
    muon, rest = own["matrices"], own["rest"]
    _train(model, own, iter((0,)))
    save(f"{tmp_path}/named", model, own, step=0)
    save(f"{tmp_path}/single", model, rest, step=0)
    before = full_parameters(model)
    _train(model, own, iter((1,)))
    after = full_parameters(model)

    def refused(text: str, given: Any, verb: Any = load, where: str = "named", **more: Any) -> None:
        with pytest.raises((CheckpointError, TypeError, ValueError), match=text):
            verb(f"{tmp_path}/{where}", model, given, **more)

    for verb in (save, load):
        for name in (1, "", "a/b", "..", "-a", "a b", "\u00e9", "a\n"):
            refused("cannot be saved; use letters", {name: rest}, verb)
        refused("optimizer 'rest': expected an optimizer, or a dict .*got list", {"rest": []}, verb)
        refused("scheduler 'a': expected an object with", own, verb, scheduler={"a": 3})
        refused(
            "empty is in two optimizers, 'matrices' and 'x'", {"matrices": muon, "x": muon}, verb
        )
        stranger = torch.optim.SGD([nn.Parameter(torch.ones(2))])
        text = r"group 0 of the optimizer 'b' has a parameter of shape \(2,\) that does not belong"
        refused(text, {"a": rest, "b": stranger}, verb)
    rank = dist.get_rank()
    differ = r"names of optimizers differ between ranks: rank 0: \[\]; rank 1: \[''\]; pass"
    refused(differ, rest if rank else None, save)

    saved = "contains the state of optimizers named 'matrices', 'rest', but optimizer= has"
    extra = {**own, "more": torch.optim.SGD([{"params": []}])}
    refused(f"{saved} optimizers named 'matrices', 'more', 'rest'", extra)
    refused(f"{saved} one optimizer without a name", rest)
    refused(
        "one optimizer without a name, but optimizer= has optimizers named", own, where="single"
    )
    refused("group 0 of the optimizer 'rest' has parameters that", {"rest": muon, "matrices": rest})
    refused("contains no scheduler state", own, scheduler={"a": _Counter()})
    assert_same_parameters(full_parameters(model), after)

    # What fits, on request.
    momentum = {p: each["momentum_buffer"].clone() for p, each in muon.state.items()}
    load(f"{tmp_path}/named", model, {"rest": rest, "a": muon}, strict=False)
    assert all(torch.equal(momentum[p], each["momentum_buffer"]) for p, each in muon.state.items())
    assert {float(rest.state[p]["step"]) for p in rest.state} == {1.0}
    assert_same_parameters(full_parameters(model), before)

    # Schedulers, too.
    both = {"a": _Counter(), "b": _Counter()}
    save(f"{tmp_path}/schedulers", model, scheduler=both)
    text = "contains the state of schedulers named 'a', 'b', but scheduler= has"
    refused(f"{text} one scheduler without a name", None, where="schedulers", scheduler=_Counter())

    # Another class in the same place.
    model = _wrapped()
    rest = torch.optim.AdamW([model.gain])
    other = WholeTensorOptimizer([model.stem.weight], torch.optim.AdamW)
    refused(r"optimizer state of .* AdamW keeps", {"matrices": other, "rest": rest})
    del other
    up = model.blocks[1].up.weight
    shampoo = WholeTensorOptimizer([up], Shampoo)
    _train(model, {"": shampoo}, iter((0,)))
    save(f"{tmp_path}/factors", model, shampoo)
    del shampoo
    text = r"up.weight/factors.* has shape .* fits a layerzero.optim.WholeTensorOptimizer"
    refused(text, Unchecked([up], lr=0.1), where="factors")


class _Counter:
    def __init__(self) -> None:
        self.count = 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self.count = state_dict["count"]


@on_ranks(2)
def test_full_state_dicts_are_gathered_from_owners_and_given_to_others() -> None:
    model = _wrapped()
    own = _optimizers(model, "shampoo")
    assert get_optimizer_state_dict(model, own["matrices"], full=True)["state"] == {}
    _train(model, own, iter((0, 1)))
    full = {n: get_optimizer_state_dict(model, each, full=True) for n, each in own.items()}
    how: dict[str, Any] = {"full": True, "cpu_offload": True, "rank0_only": True}
    on_first = {n: get_optimizer_state_dict(model, each, **how) for n, each in own.items()}
    with pytest.raises(NotImplementedError, match="pass full=True, or use"):
        get_optimizer_state_dict(model, own["matrices"])
    with pytest.raises(ValueError, match="rank0_only needs full=True"):
        get_model_state_dict(model, rank0_only=True)
    weights = get_model_state_dict(model, full=True)
    weights_on_first = get_model_state_dict(model, **how)
    is_first = dist.get_rank() == 0
    assert list(weights_on_first) == (list(weights) if is_first else [])
    assert all(bool(each) == is_first for each in on_first.values())
    _train(model, own, iter((2, 3)))
    expected = full_parameters(model)
    for values, states, is_sent in ((weights_on_first, on_first, True), (weights, full, False)):
        again = _wrapped(seed=1)
        others = _optimizers(again, "shampoo", lr=0.9)
        set_model_state_dict(again, values, broadcast_from_rank0=is_sent)
        for name, each in others.items():
            set_optimizer_state_dict(again, each, states[name], broadcast_from_rank0=is_sent)
        _train(again, others, iter((2, 3)))
        assert_same_parameters(full_parameters(again), expected)
    third = _wrapped()
    sgd = torch.optim.SGD(third.parameters(), momentum=0.9)
    _train(third, {"": sgd}, iter((0,)))
    shards = get_optimizer_state_dict(third, sgd)
    with pytest.raises(CheckpointError, match="is a shard, but WholeTensorOptimizer keeps"):
        set_optimizer_state_dict(again, others["matrices"], shards, strict=False)


@on_ranks(2)
def test_torchs_tools_refuse_the_whole_states_of_one_rank(tmp_path: Path) -> None:
    """They would take the states of this rank for all states."""
    model = _wrapped()
    own = _optimizers(model, "whole_adamw")["matrices"]
    _train(model, {"": own}, iter((0,)))
    everything = theirs.StateDictOptions(full_state_dict=True)
    with pytest.raises(NotImplementedError, match=r"use layerzero\.checkpoint\.save, or"):
        theirs.get_optimizer_state_dict(model, own, options=everything)
    with pytest.raises(dcp.api.CheckpointException, match=r"use layerzero\.checkpoint\.save, or"):
        dcp.save(theirs.get_optimizer_state_dict(model, own), checkpoint_id=f"{tmp_path}/dcp")


@on_ranks(2)
def test_a_model_inside_a_larger_one_is_saved_under_its_new_names(tmp_path: Path) -> None:
    inner = _wrapped()
    own = _optimizers(inner, "muon")
    _train(inner, own, iter((0,)))
    outer = ZeRO3(nn.ModuleDict({"inside": inner}), gradient_reduction="sum")
    save(f"{tmp_path}/renamed", outer, own)
    manifest = json.loads(Path(tmp_path, "renamed/step-00000000/checkpoint.json").read_bytes())
    saved = {name for name in manifest["tensors"]["optimizer"] if "momentum" in name}
    matrices = own["matrices"].param_groups[0]["params"]
    assert saved == {f"{p.layerzero.fqn}/momentum_buffer" for p in matrices}
    assert all(name.startswith("inside.") for name in saved)
    before = get_optimizer_state_dict(outer, own["matrices"], full=True)["state"]
    _train(inner, own, iter((1,)))
    load(f"{tmp_path}/renamed", outer, own)
    after = get_optimizer_state_dict(outer, own["matrices"], full=True)["state"]
    assert len(before) == len(saved)
    for name, state in before.items():
        assert_bitwise(after[name]["momentum_buffer"], state["momentum_buffer"], name)


@on_ranks(2)
def test_an_optimizer_with_a_state_dict_of_its_own_is_refused(tmp_path: Path) -> None:
    model = _wrapped()
    matrices = [p for p in model.parameters() if p.layerzero.ndim == 2]
    whole = WholeTensorOptimizer(matrices, Lookahead, lr=0.1)
    for own in (Lookahead(matrices, 0.1), {"one": whole}):
        for verb in (save, load):
            with pytest.raises(ValueError, match=r"of Lookahead to have .* \['base', 'slow'\]"):
                verb(f"{tmp_path}/own", model, own)
    with pytest.raises(ValueError, match=r"of Lookahead to have .* \['base', 'slow'\]"):
        get_optimizer_state_dict(model, whole, full=True)
    assert not Path(tmp_path, "own").exists()


@on_ranks(2)
def test_states_that_could_not_be_put_together_are_refused_by_the_save(tmp_path: Path) -> None:
    model = _wrapped()
    sgd = torch.optim.SGD(model.parameters())
    group, parameters = sgd.param_groups[0], list(model.parameters())
    odd: list[tuple[dict[Any, Any], dict[str, Any], str]] = [
        ({"k": torch.ones(())}, {}, r"as keys, .* got \['k', "),
        ({p: {"buffers": {0.9: p.clone()}} for p in parameters}, {}, "in a container for a shard"),
        (
            {p: {"first": p.clone() if p.numel() else p.new_zeros(())} for p in parameters},
            *({}, "has none like it"),
        ),
        ({}, {"d": dist.get_rank()}, "options of optimizer groups differ between ranks"),
    ]
    for state, options, words in odd:
        sgd.state.clear()
        sgd.state.update(state)
        group.update(options)
        with pytest.raises((CheckpointError, ValueError), match=words):
            save(f"{tmp_path}/odd", model, sgd)
    around = Around(torch.optim.SGD(parameters, momentum=0.9))
    _train(model, {"": around}, iter((0,)))
    with pytest.raises(ValueError, match="pass the optimizer that it wraps"):
        save(f"{tmp_path}/around", model, around)
    # A number of one parameter may be a tensor of another.
    del group["d"]
    sgd.state.clear()
    vectors = {p for p in parameters if p.layerzero.ndim < 2}
    states = {p: {"first": p.new_ones(()) if p in vectors else p.clone()} for p in parameters}
    sgd.state.update(states)
    save(f"{tmp_path}/mixed", model, sgd)
    again = torch.optim.SGD(parameters)
    load(f"{tmp_path}/mixed", model, again)
    for parameter, state in states.items():
        assert_bitwise(again.state[parameter]["first"], state["first"], "first")
