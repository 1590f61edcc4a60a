"""Code that takes shards for whole parameters warns: optimizers, groups by shape."""

from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import layerzero
from layerzero.optim import decay_groups
from tests.harness.checks import recorded_warnings
from tests.harness.compare import assert_same_values, zero3
from tests.harness.models import WIDTH, Block, Mlp, loss_of
from tests.harness.ranks import on_ranks
from tests.harness.reference import seeded


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
