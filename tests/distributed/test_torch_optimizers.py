"""Every optimizer of torch.optim is in the table of docs/howto/optimizers.md, which holds; those
that fail on empty tensors train without them, and their state is right."""

import copy
import inspect
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from layerzero import ZeRO3, checkpoint
from layerzero.optim import decay_groups
from tests.harness.checks import assert_bitwise
from tests.harness.compare import assert_same_values, sharded
from tests.harness.models import CASES
from tests.harness.pages import DOCS
from tests.harness.ranks import KeptRanks, on_ranks
from tests.harness.reference import batches_of, forward_backward, seeded

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


class Sums(torch.optim.Optimizer):
    key = "sum"

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                self.state[parameter][self.key] = parameter.grad.clone()


class Means(Sums):
    """Has the same options, and other state."""

    key = "mean"


@pytest.mark.filterwarnings("ignore:Sums was given sharded parameters")
@on_ranks(2)
def test_state_with_other_keys_is_refused_though_the_options_are_the_same() -> None:
    model = sharded(CASES["mlp"])
    one, other = Sums(model.parameters()), Means(model.parameters())
    forward_backward(model, batches_of(CASES["mlp"], 1, 1)[0][0])
    one.step()
    state = checkpoint.get_optimizer_state_dict(model, one)
    with pytest.raises(checkpoint.CheckpointError, match="it was saved by another optimizer class"):
        checkpoint.set_optimizer_state_dict(model, other, state)
    checkpoint.set_optimizer_state_dict(model, one, state)
